#!/usr/bin/env bash
# Measures again what the README shows, and keeps the rows in results/: scripts/measure.sh GROUP ...
#
# The text is sotu.txt, some MB of any. Several GPUs share the jobs of a sweep; what else there is takes the first of
# CUDA_VISIBLE_DEVICES. What fails stops nothing, and has a row that says why; after Ctrl-C sweeps and searches go on.
set -u
cd "$(dirname "$0")/.."
text="data=text data.path=sotu.txt data.tokenizer=gpt2"
speed="+experiment=throughput $text"
short="precision=bf16 train.max_steps=25"
wide="train.block_size=16384 model.block_size=16384 train.batch_size=4"
both="kernels=eager,triton kernels.compile=true"
all=sdpa,flash,triton,flex,mem_efficient,triton_naive,eager,math

run() { # NAME WORDS ...
    python train.py "${@:2}" out_dir="out/$1" && python -m scripts.collect "out/$1"
}

sweep() { # NAME WORDS ...
    python train.py -m $speed "${@:2}" out_dir="out/$1"
    [ $? = 75 ] || python -m scripts.collect "out/$1"/*/ # 75: stopped, with jobs left
}

longest() { # NAME WORDS ...
    python -m scripts.max_context precision=bf16 probe_minutes=${minutes:-3} keep=true "${@:2}" out_dir="out/longest-$1"
}

# GPT-2 124M: presets with intervals, then in amp, and every other attention
presets() { sweep presets $short kernels=eager,triton kernels.compile=true,false attn=sdpa,flash,triton sweep.repeats=3; }
amp() { sweep amp precision=amp train.max_steps=100 kernels=eager,triton kernels.compile=true,false; }
attentions() { sweep attentions $short attn=sdpa,flex,mem_efficient,triton_naive,eager,math $both; }
long() { sweep long $short $wide attn=$all $both; }

# 350M, with every attention
medium() { sweep medium $short model=gpt2_350m train.batch_size=32 attn=$all $both; }
medium_long() { sweep medium-long $short $wide model=gpt2_350m attn=$all $both; }

# As the README's first lines have it; and attn=auto, from a table of this machine
typed() {
    local brief="train.max_steps=60 train.eval_every=0 train.checkpoint_every=0 train.sample_tokens=0"
    run typed kernels=triton attn=flash $brief
}
auto() {
    python -m scripts.bench_attention auto=true lengths='[1024,16384]' rounds=3
    run auto $speed $short kernels=triton attn=auto
}

# nanoGPT's are 131,072 (eager), 196,608 (compile), and with Liger's loss and a checkpoint per block 1.9 million, of which
# a step of half a million takes 57 s and 37.5 GiB
lean="kernels=triton kernels.mlp=triton_recompute attn=flash model.pos=rope"
context_checkpoints() { longest checkpoints $lean model.checkpointing=block mode=train; }
context_host() { minutes=5 longest host $lean model.checkpointing=host mode=train; } # pinning 96 GiB takes one
context_triton() { longest triton kernels=triton attn=flash model.pos=rope; }
context_eager() { longest eager kernels=eager; }
context_compile() { longest compile kernels=compile mode=train; }
half_million() { sequence half-million 524288 5; }
two_million() { # some nine minutes
    cat sotu.txt sotu.txt >out/twice.txt && text=${text/sotu/out/twice} sequence two-million 2097152 1
}
sequence() { # NAME T STEPS
    local length="train.block_size=$2 model.block_size=$2 train.batch_size=1 train.tokens_per_step=$2"
    run "$1" $lean model.checkpointing=host model.keep_attention=true precision=bf16 $text $length \
        train.max_steps=$3 train.log_every=1 train.eval_every=0 train.checkpoint_every=0 train.sample_tokens=0
}

# A kernel, its double, and one that naps 0.3 ms a call, which makes the step 5% longer: a tie, and slower
same() {
    local copy=out/same.copy
    mkdir -p $copy .cache && cp -rp train.py configs data kernels model runtime scripts sotu.txt .cache $copy
    echo "from kernels.norm.triton import RUNS, detail, norm, unavailable" >$copy/kernels/norm/same.py
    cat >$copy/kernels/norm/slow.py <<END
import torch
from kernels.norm import triton
from kernels.norm.triton import RUNS, detail, unavailable

def norm(*arguments, **named):
    torch.cuda._sleep(550_000)  # cycles; of 350,000 the step was 3.3% longer
    return triton.norm(*arguments, **named)
END
    (cd $copy && python train.py -m $speed $short kernels=triton attn=flash kernels.norm=triton,same,slow \
        sweep.repeats=3 out_dir=out/same)
    [ $? = 75 ] || python -m scripts.collect --beside h200-same $copy/out/same/*/
}

# Kernels by themselves, attention against T, what runs at all, and losses of 300 steps
ops() { for op in norm mlp loss; do python -m scripts.bench_kernels op=$op keep=true; done; }
attention() { python -m scripts.bench_attention keep=true; }
support() { python -m scripts.doctor matrix=true keep=true; }
curves() {
    for kernels in eager compile; do
        python train.py +experiment=curve $text kernels=$kernels out_dir=out/$kernels-sdpa
    done
    python -m scripts.collect --curves out/{eager,compile}-sdpa
}

for group in "$@"; do
    declare -F "$group" >/dev/null || { echo "error: scripts/measure.sh has no group $group" >&2 && exit 2; }
done
for group in "$@"; do
    $group
done
