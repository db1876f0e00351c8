"""Models on the Hugging Face hub, with a hub on this machine in its place."""

import hashlib
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from lab.proof.references import init_files
from model.pretrained import read_pretrained, read_shape
from runtime.config import UserError
from tests.model.test_gpt import gpt, hugging_face
from tests.model.test_pretrained import MODEL, equal


@pytest.fixture
def folder(tmp_path):
    """The folder that transformers' save_pretrained writes for `gpt()`."""
    hugging_face(gpt()).save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


class Hub(BaseHTTPRequestHandler):
    """A hub with one model, openai-community/gpt2, in `server.folder`. It lists its requests in `server.asked`."""

    def do_GET(self):
        self.server.asked.append(f"{self.command} {self.path}")
        commit, folder = self.server.commit, self.server.folder
        if self.server.gated:
            return self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        if "openai-community/gpt2/" not in self.path:
            return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if "/tree/" in self.path:
            files = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": "1"} for f in folder.iterdir()]
            return self.answer(200, json.dumps(files).encode())
        if "/api/" in self.path:
            files = [{"rfilename": file.name} for file in folder.iterdir()]
            return self.answer(
                200, json.dumps({"id": "openai-community/gpt2", "sha": commit, "siblings": files}).encode()
            )
        file = folder / self.path.rsplit("/", 1)[1]
        etag = hashlib.sha256(file.read_bytes()).hexdigest()
        return self.answer(200, file.read_bytes(), {"X-Repo-Commit": commit, "ETag": f'"{etag}"'})

    do_HEAD = do_GET

    def answer(self, status, body, headers=()):
        self.send_response(status)
        for key, value in {"Content-Length": len(body), **dict(headers)}.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """hub(address) sets the address of the hub, and hub(None) sets HF_HUB_OFFLINE=1. The cache is empty at first."""
    from huggingface_hub import constants

    for key in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.chdir(tmp_path)

    def set_address(address):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", address is None)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        files = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)

    return set_address


@pytest.fixture
def server(hub, folder, monkeypatch):
    """Start a hub that has the model in `folder`, and set its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.folder, server.asked, server.commit = folder, [], "0" * 40
    server.gated = False
    monkeypatch.setattr("data.hub.HUB_SECONDS", 60)  # the test does not depend on the machine's speed
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub(f"http://127.0.0.1:{server.server_port}")
    yield server
    server.shutdown()
    server.server_close()


def test_a_model_on_the_hub(hub, folder, server):
    """For the shape only config.json is downloaded. Nothing in the cache is requested again."""
    (folder / "pytorch_model.bin").write_bytes(b"not wanted")
    assert read_shape("openai-community/gpt2")[:3] == ({**MODEL, "tie_embeddings": True}, {}, "openai-community/gpt2")
    assert {line.rsplit("/", 1)[1] for line in server.asked if line.startswith("GET") and "resolve" in line} == {
        "config.json"
    }
    with pytest.raises(UserError, match=r"openai/gpt5: .* and http://127.0.0.1:\d+ answers 404: check the name"):
        read_pretrained("openai/gpt5")
    assert equal(read_pretrained("openai-community/gpt2").weights, dict(gpt().state_dict()))
    assert not [line for line in server.asked if ".bin" in line]
    asked = len(server.asked)
    read_pretrained("openai-community/gpt2")
    assert len(server.asked) == asked
    server.shutdown()
    hub(None)
    assert equal(read_pretrained("openai-community/gpt2").weights, dict(gpt().state_dict()))


def test_a_gated_model_needs_a_licence(server):
    """huggingface_hub's error for it is also a RepositoryNotFoundError, but its name is right."""
    server.gated = True
    message = (
        r"^meta-llama/Llama-3.2-1B is gated: accept its licence on http://127.0.0.1:\d+/meta-llama/Llama-3.2-1B, then"
    )
    with pytest.raises(UserError, match=message) as error:
        read_shape("meta-llama/Llama-3.2-1B")
    assert "\n" not in str(error.value)


def test_a_newer_revision_in_the_cache_makes_a_new_reference_of_parity(server, folder):
    """The file's size is the same. A download of the same revision makes none."""
    from huggingface_hub import snapshot_download

    keys = [init_files("openai-community/gpt2")]
    for commit, seed in (("0", 0), ("1", 0), ("2", 1)):
        server.commit = commit * 40
        if seed:
            hugging_face(gpt(seed=seed)).save_pretrained(folder)
        snapshot_download("openai-community/gpt2")
        keys.append(init_files("openai-community/gpt2"))
    assert keys[0] == keys[1] == keys[2] != keys[3]
    assert equal(read_pretrained("openai-community/gpt2").weights, dict(gpt(seed=1).state_dict()))


@pytest.mark.parametrize("checks", [True, False])
def test_a_part_of_the_weights_that_is_missing_in_the_cache_is_downloaded(
    hub, folder, server, tmp_path, monkeypatch, checks
):
    """A download that was killed leaves such a cache. Older versions of huggingface_hub return it without a check."""
    import huggingface_hub

    snapshot_download = huggingface_hub.snapshot_download

    def without_check(*arguments, local_files_only=False, **more):
        if local_files_only and (snapshots := [*(tmp_path / "cache").rglob("snapshots/*")]):
            return str(snapshots[0])
        return snapshot_download(*arguments, local_files_only=local_files_only, **more)

    if not checks:
        monkeypatch.setattr(huggingface_hub, "snapshot_download", without_check)
    (folder / "model.safetensors").unlink()
    hugging_face(gpt()).save_pretrained(folder, max_shard_size="20KB")
    *_, part = sorted(folder.glob("model-*.safetensors"))
    read_pretrained("openai-community/gpt2")
    [cached] = (tmp_path / "cache").rglob(f"snapshots/*/{part.name}")
    cached.resolve().unlink()
    cached.unlink()
    server.asked.clear()
    assert equal(read_pretrained("openai-community/gpt2").weights, dict(gpt().state_dict()))
    downloads = [line for line in server.asked if line.startswith("GET") and "resolve" in line]
    assert [line.rsplit("/", 1)[1] for line in downloads] == [part.name]
    cached.unlink()
    hub(None)
    with pytest.raises(UserError, match="it is not in the hub's cache, and HF_HUB_OFFLINE forbids the download"):
        read_pretrained("openai-community/gpt2")


def test_a_cache_that_cannot_be_written_is_named_by_its_path(hub, server, monkeypatch, tmp_path):
    """Root may write everywhere, but not below a file."""
    from huggingface_hub import constants

    cache = tmp_path / "file"
    cache.touch()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
    with pytest.raises(UserError, match=f"{cache}.*Not a directory; set HF_HOME to a folder that can be") as error:
        read_shape("openai-community/gpt2")
    assert "\n" not in str(error.value)


def test_no_network(hub, monkeypatch):
    """A hub that refuses, is silent, or whose name is not found gives an error of one line; so does HF_HUB_OFFLINE.

    Nothing is downloaded, and the error does not wait for a slow look-up of the hub's name.
    """
    import huggingface_hub

    closed = socket.create_server(("127.0.0.1", 0))
    silent = socket.create_server(("127.0.0.1", 0))
    addresses = [f"http://127.0.0.1:{server.getsockname()[1]}" for server in (closed, silent)]
    closed.close()
    look_up, snapshot_download = socket.getaddrinfo, huggingface_hub.snapshot_download
    error_is_raised, waited = threading.Event(), []

    def slow_look_up(host, *rest, **more):
        if host == "hub.example" and not error_is_raised.wait(30):
            waited.append(host)
        return look_up(host, *rest, **more)

    def cached_only(*arguments, local_files_only=False, **more):
        assert local_files_only, "a download from a hub that cannot be reached"
        return snapshot_download(*arguments, local_files_only=True, **more)

    monkeypatch.setattr(socket, "getaddrinfo", slow_look_up)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", cached_only)
    for address in (*addresses, "http://hub.example", None):
        hub(address)
        reason = f"{address} does not answer" if address else "HF_HUB_OFFLINE forbids the download"
        with pytest.raises(UserError, match=f"^gpt2: there is no such file or folder, .* and {reason}") as error:
            read_shape("gpt2")
        assert "\n" not in str(error.value)
    assert waited == []
    error_is_raised.set()
    silent.close()


@pytest.mark.parametrize("name", ["out/RUN/checkpoints", "/nowhere", "a--b/c", ""])
def test_names_that_are_no_model(hub, name):
    hub(None)
    with pytest.raises(UserError, match=r"there is no such file or folder|holds no valid checkpoint"):
        read_pretrained(name)
