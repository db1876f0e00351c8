/* Preloaded into a process, this counts its operations on the files below a folder, and lets one of them fail.

   inject.py compiles it, and calls arm_crashtest() in the process that trains. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

/* inject.Operation */
enum { OPEN, READ, STAT, CREATE, WRITE, SYNC, MAKE, RENAME, REMOVE, OUTPUT };

static char folder[PATH_MAX]; /* empty: count nothing */
static int kinds, error_number, again;
static long at, *count;
static pid_t victim;

/* Count the chosen kinds in count[0], and each kind in count[1 + kind]. Operation number `at` of the chosen ones fails,
   and with `forever` also the later ones. With error 0 it kills the process. */
void arm_crashtest(const char *path, int chosen, long number, int error, int forever, long *counter) {
    kinds = chosen, at = number, error_number = error, again = forever, count = counter, victim = getpid();
    snprintf(folder, sizeof folder, "%s/", path);
}

/* Return whether a path, relative to an open folder, or the file of a descriptor is in the folder. */
static int is_below(int descriptor, const char *path) {
    char link[64], whole[2 * PATH_MAX];
    if (path && path[0] == '/') return !strncmp(path, folder, strlen(folder));
    if (descriptor == AT_FDCWD) strcpy(link, "/proc/self/cwd");
    else snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, whole, PATH_MAX);
    if (length < 0) return 0;
    snprintf(whole + length, sizeof whole - length, "/%s", path ? path : "");
    return !strncmp(whole, folder, strlen(folder));
}

/* Count this operation. Return 1 if it is the one that fails, 2 if an earlier one was, and 0 if it succeeds. */
static int is_due(int kind, int descriptor, const char *path) {
    int before = errno, due = 0;
    if (folder[0] && is_below(descriptor, path)) {
        __atomic_fetch_add(&count[1 + kind], 1, __ATOMIC_SEQ_CST);
        long number = kinds >> kind & 1 ? __atomic_fetch_add(count, 1, __ATOMIC_SEQ_CST) : -1;
        due = number < 0 || number < at ? 0 : number == at ? 1 : again ? 2 : 0;
    }
    errno = due ? error_number : before;
    return due;
}

static void die(void) {
    kill(victim, SIGKILL);
    for (;;) pause();
}

static int fails(int kind, int descriptor, const char *path) {
    int due = is_due(kind, descriptor, path);
    if (due && !error_number) die();
    return due;
}

#define NEXT(name) static __typeof__(&name) next; if (!next) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define HOOK(kind, type, name, parameters, arguments, descriptor, path, failed) \
    type name parameters { NEXT(name); return fails(kind, descriptor, path) ? failed : next arguments; }

#define OPENS(name, parameters, descriptor, ...) \
    int name parameters { \
        NEXT(name); va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
        return fails(flags & O_CREAT ? CREATE : OPEN, descriptor, path) ? -1 : next(__VA_ARGS__, flags, mode); \
    }
OPENS(open, (const char *path, int flags, ...), AT_FDCWD, path)
OPENS(open64, (const char *path, int flags, ...), AT_FDCWD, path)
OPENS(openat, (int from, const char *path, int flags, ...), from, from, path)
OPENS(openat64, (int from, const char *path, int flags, ...), from, from, path)
HOOK(mode[0] == 'r' ? OPEN : CREATE, FILE *, fopen, (const char *path, const char *mode),
    (path, mode), AT_FDCWD, path, NULL)
HOOK(mode[0] == 'r' ? OPEN : CREATE, FILE *, fopen64, (const char *path, const char *mode),
    (path, mode), AT_FDCWD, path, NULL)
HOOK(OPEN, DIR *, opendir, (const char *path), (path), AT_FDCWD, path, NULL)

/* A kill leaves the first half of a write. So does a disk that is full from now on; the next write fails. */
#define WRITES(name, parameters, ...) \
    ssize_t name parameters { \
        NEXT(name); \
        int due = is_due(file == 1 || file == 2 ? OUTPUT : WRITE, file, NULL); \
        size_t some = !due ? size : due == 1 && (!error_number || (error_number == ENOSPC && again)) ? size / 2 : 0; \
        ssize_t done = due && !some ? -1 : next(__VA_ARGS__); \
        if (due && !error_number) die(); \
        return done; \
    }
WRITES(write, (int file, const void *bytes, size_t size), file, bytes, some)
WRITES(pwrite, (int file, const void *bytes, size_t size, off_t place), file, bytes, some, place)
WRITES(pwrite64, (int file, const void *bytes, size_t size, off64_t place), file, bytes, some, place)
WRITES(sendfile, (int file, int from, off_t *place, size_t size), file, from, place, some)
WRITES(sendfile64, (int file, int from, off64_t *place, size_t size), file, from, place, some)
HOOK(WRITE, ssize_t, writev, (int file, const struct iovec *parts, int number), (file, parts, number), file, NULL, -1)
HOOK(WRITE, int, ftruncate64, (int file, off64_t size), (file, size), file, NULL, -1)
HOOK(READ, ssize_t, read, (int file, void *bytes, size_t size), (file, bytes, size), file, NULL, -1)
HOOK(READ, ssize_t, pread64, (int file, void *bytes, size_t size, off64_t place),
    (file, bytes, size, place), file, NULL, -1)
HOOK(READ, ssize_t, readv, (int file, const struct iovec *parts, int number), (file, parts, number), file, NULL, -1)
HOOK(SYNC, int, fsync, (int file), (file), file, NULL, -1)
HOOK(SYNC, int, fdatasync, (int file), (file), file, NULL, -1)

HOOK(STAT, int, stat64, (const char *path, struct stat64 *status), (path, status), AT_FDCWD, path, -1)
HOOK(STAT, int, lstat64, (const char *path, struct stat64 *status), (path, status), AT_FDCWD, path, -1)
HOOK(STAT, int, fstatat64, (int from, const char *path, struct stat64 *status, int flags),
    (from, path, status, flags), from, path, -1)
HOOK(MAKE, int, mkdir, (const char *path, mode_t mode), (path, mode), AT_FDCWD, path, -1)
HOOK(MAKE, int, symlink, (const char *target, const char *path), (target, path), AT_FDCWD, path, -1)
HOOK(RENAME, int, rename, (const char *from, const char *path), (from, path), AT_FDCWD, path, -1)
HOOK(REMOVE, int, unlink, (const char *path), (path), AT_FDCWD, path, -1)
HOOK(REMOVE, int, unlinkat, (int from, const char *path, int flags), (from, path, flags), from, path, -1)
HOOK(REMOVE, int, rmdir, (const char *path), (path), AT_FDCWD, path, -1)
