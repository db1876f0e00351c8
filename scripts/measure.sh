#!/usr/bin/env bash
# Measure the rows in results/ again: scripts/measure.sh GROUP ...
#
# In older rows `triton` names what `gluon` names now. The groups below name gluon, for a Hopper GPU.
# GROUP is the name of a function below, from `rungs` on. The training text is sotu.txt in the root of the repo: a few
# MB of any text. Sweeps use all GPUs, torchrun the first two; the other commands use the first GPU of
# CUDA_VISIBLE_DEVICES. If a job fails, its row says why, and the next job starts. After Ctrl-C, the same group resumes
# its sweeps and searches.
set -u
trap 'exit 130' INT # otherwise bash would go on to the next command, because a command handles Ctrl-C itself
cd "$(dirname "$0")/.."
text="data=text data.path=sotu.txt data.tokenizer=gpt2"
speed="+experiment=throughput $text"
short="precision=bf16 train.max_steps=25"
wide="train.block_size=16384 model.block_size=16384 train.batch_size=4"
both="kernels=eager,triton,gluon kernels.compile=true"
two="torchrun --standalone --nproc_per_node=2"
today="checkpoint=random precision=bf16 proof=true prompt_tokens=128 max_new_tokens=128 temperature=0"
all=sdpa,flash,triton,gluon,flex,mem_efficient,eager,math
sitting="out/sitting-$(git rev-parse --short HEAD 2>/dev/null)"

run() { # NAME WORDS ...; with launch=COMMAND instead of python
    ${launch:-python} train.py "${@:2}" out_dir="out/$1" && python -m scripts.collect "out/$1"
}

sweep() { # NAME WORDS ...; with beside=FOLDER the rows go to results/FOLDER
    python train.py -m $speed "${@:2}" out_dir="out/$1"
    [ $? = 75 ] || python -m scripts.collect ${beside:+--beside $beside} "out/$1"/*/ # 75: stopped, and jobs are left
}

longest() { # NAME WORDS ...
    ${launch:-python} -m scripts.max_context precision=bf16 probe_minutes=${minutes:-3} keep=true "${@:2}" \
        out_dir="out/longest-$1"
}

# The tables of rungs in README.md, in about eight minutes, with the text of Python's standard library
rungs() {
    part rungs train.py +sweep=rungs
    part decoding -m scripts.generate +sweep=decoding_rungs checkpoint=random
}
# The first tables of results/README.md. On an H200, by the times of its rows: ladder 17 minutes (5.5, 2.5 and 2.5 for
# the rungs, 3.5 for decoding, 1.5 for each search), ladder_models 19 (4 for torch.compile of 1558M), ladder_peers 8
ladder() {
    part rungs-three-times train.py +sweep=rungs sweep.repeats=3
    part decoding -m scripts.generate +sweep=decoding_rungs checkpoint=random
    local search="mode=train precision=bf16 probe_minutes=1 kernels=gluon attn=triton model.pos=rope"
    part context -m scripts.max_context -m $search model.checkpointing=none
    part context-block -m scripts.max_context -m $search model.checkpointing=block kernels.mlp=gluon_recompute
}
ladder_models() {
    local steps="train.max_steps=25" # their references, once a model, take half a minute (an estimate)
    local rungs="train.py +sweep=rungs sweep.own_caches=false $steps"
    part smollm2_135m $rungs model=smollm2_135m train.block_size=1024
    part modern_124m $rungs model=modern_124m
    part modern_124m-lean train.py -m +experiment=throughput model=modern_124m precision=bf16 $steps attn=gluon \
        kernels=gluon kernels.{rope,rms_norm}=triton_recompute
    part gpt2_350m $rungs model=gpt2_350m train.batch_size=32
    part gpt2_1558m $rungs model=gpt2_1558m train.batch_size=16 train.tokens_per_step=16384
}
ladder_peers() { # nanogpt=FOLDER is a checkout of nanoGPT. In amp, because its users train so
    local other="train.max_steps=25 proof=false" # the proof is for our own model
    peer gpt2_124m nanogpt "system=nanogpt path=${nanogpt:-../nanoGPT}" kernels=compile precision=amp
    peer gpt2_124m transformers "" kernels=compile precision=bf16
    local model
    for model in smollm2_135m modern_124m; do
        peer $model transformers "" kernels=compile precision=bf16 train.block_size=1024
        peer $model liger liger=true precision=bf16 train.block_size=1024
        peer $model liger-compile liger=true kernels=compile precision=bf16 train.block_size=1024
    done
}
# Do the choices train alike? Five choices, three seeds and 300 steps, in about 17 minutes: a run takes 45 to 75 s
agreement() {
    local words into="--suffix agreement --curves"
    for words in "eager attn=sdpa" "compile attn=sdpa" "triton attn=triton" "gluon attn=gluon" \
        "gluon kernels.loss=triton kernels.glu=triton attn=gluon precision=fp8"; do
        part "${words//[ =,]/-}" train.py -m +experiment=curve precision=bf16 seed=1,2,3 kernels=$words
    done
}
# The folder's name has the commit, so a second call resumes
part() { # NAME WORDS ...: a sweep on the first GPU. Its rows go to results/DEVICE-rungs, or where into= says
    local folder="$sitting/$1" gpus=${CUDA_VISIBLE_DEVICES:-0}
    CUDA_VISIBLE_DEVICES=${gpus%%,*} python "${@:2}" out_dir="$folder"
    [ $? = 75 ] || python -m scripts.collect ${into:---suffix rungs} "$folder"/*/
}
peer() { # NAME CHOICE OWN WORDS ...: another system's model NAME; OWN are the words of scripts.peers
    local folder="$sitting/peer-$1-$2" gpus=${CUDA_VISIBLE_DEVICES:-0}
    grep -qs '"status": "ok"' "$folder/result.json" ||
        CUDA_VISIBLE_DEVICES=${gpus%%,*} python -m scripts.peers $3 out_dir="$folder" -- model=$1 $other "${@:4}"
    python -m scripts.collect --suffix rungs "$folder"
}

# The table of course/README.md, on one GPU in about fifteen minutes
course() {
    local -x CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0}"
    CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES%%,*}
    python -m scripts.course keep=true
    python train.py +sweep=course out_dir=out/course
    [ $? = 75 ] || python -m scripts.collect --beside "${beside:-h200-course}" out/course/*/
}

# GPT-2 124M in bf16 with intervals, then in amp, then every other attention, then sequences of 16,384
presets() { sweep presets $short kernels=eager,triton,gluon kernels.compile=true,false attn=sdpa,flash,gluon sweep.repeats=3; }
amp() { sweep amp precision=amp train.max_steps=100 kernels=eager,triton,gluon kernels.compile=true,false; }
attentions() { sweep attentions $short attn=sdpa,flex,mem_efficient,eager,math $both; }
long() { sweep long $short $wide attn=$all $both; }

# GPT-2 350M with every attention
medium() { sweep medium $short model=gpt2_350m train.batch_size=32 attn=$all $both; }
medium_long() { sweep medium-long $short $wide model=gpt2_350m attn=$all $both; }

# precision=fp8 beside bf16, with torch.compile, Triton and torchao: GPT-2 124M, 350M and 1558M
fp8() { both_precisions 124m; }
fp8_350m() { both_precisions 350m model=gpt2_350m train.batch_size=32; }
# with steps of 65,536 tokens, the 20 steps of the reference, which is eager in fp32, would take four minutes
fp8_1558m() { both_precisions 1558m model=gpt2_1558m train.batch_size=16 train.tokens_per_step=16384; }
both_precisions() { # NAME WORDS ...
    local beside=h200-fp8
    sweep "fp8-$1" $short "${@:2}" attn=flash precision=bf16,fp8 kernels=compile,triton
    sweep "fp8-$1-attention" $short "${@:2}" attn=gluon precision=bf16,fp8 kernels=gluon \
        kernels.loss=triton # the loss in Gluon has no fp8
    sweep "fp8-$1-torchao" $short "${@:2}" attn=flash precision=fp8 kernels=compile,triton,torchao kernels.compile=true \
        kernels.fp8='[linear,mlp]' # torchao has no loss
}

# Steps of 16 and of 4 sequences, and of 128 tokens of a tiny model, replayed from a CUDA graph and not
small_steps() {
    for size in 16 4; do
        sweep "small-$size" $short attn=flash train.batch_size=$size train.tokens_per_step=$((1024 * size)) \
            kernels=gluon,compile train.cuda_graph=true,false
    done
    sweep small-tiny precision=bf16 train.max_steps=400 model=tiny data.tokenizer=bytes train.block_size=128 \
        train.batch_size=1 train.tokens_per_step=128 kernels=gluon,compile train.cuda_graph=true,false
}

# GPT-2 124M and 1558M on one GPU and on two, in about 3 minutes; with torch.compile in about 6
overlap() { on_two_gpus overlap kernels=gluon attn=sdpa; }
overlap_compile() { on_two_gpus overlap-compile kernels=compile attn=sdpa; }
on_two_gpus() { # NAME WORDS ...
    local words="$speed precision=bf16 proof=false train.max_steps=50 ${*:2}"
    local large="model=gpt2_1558m train.batch_size=8" parallel
    python train.py $words out_dir="out/$1-124m"
    $two train.py $words train.tokens_per_step=131072 out_dir="out/$1-124m-ddp"
    $two train.py $words train.tokens_per_step=131072 parallel=fsdp out_dir="out/$1-124m-fsdp"
    python train.py $words $large train.tokens_per_step=8192 out_dir="out/$1-1558m"
    for parallel in fsdp zero2; do
        $two train.py $words $large train.tokens_per_step=16384 parallel=$parallel out_dir="out/$1-1558m-$parallel"
    done
    python -m scripts.collect --beside "${beside:-h100x2}" "out/$1"-{124m{,-ddp,-fsdp},1558m{,-fsdp,-zero2}}
}

# Greedy decoding of one sequence with the models of today: two minutes, and an estimate of five for torch.compile.
# kernels.decode=huggingface is not here, because it decodes GPT-2 alone
today_decode() {
    local words="$today model=smollm2_135m,qwen3_0_6b,llama3_2_1b" into="--suffix today"
    part today-compile -m scripts.generate -m $words kernels=compile
    part today-decode -m scripts.generate -m $words kernels.decode=triton,persistent
}
# The same models with more sequences, weights in int8, a cache in fp8 and drafts: about four minutes (an estimate)
today_batches() {
    local words="$today model=smollm2_135m,qwen3_0_6b" into="--suffix today"
    part today-batches -m scripts.generate -m $words kernels.decode=triton,int8 batch=8,64
    part today-drafts -m scripts.generate -m $words kernels.decode=triton generate.speculate=ngram batch=1,8
    part today-fp8 -m scripts.generate -m $words kernels=triton attn=triton generate.kv=fp8 batch=8
}

# The slower mode of torch.compile, in the steps of the ladder: eight minutes for GPT-2 on an H200 with 16 cores. Of the
# sitting's modes, the first table of results/README.md then takes the fastest, and the second the leanest.
# max-autotune-cutlass is not here: it compiles even longer. Of ten products of GPT-2, CUTLASS is faster in two, by 0.2%
# of a step
compile_modes() {
    local words="precision=bf16 kernels=compile attn=sdpa kernels.compile_mode=max-autotune-no-cudagraphs"
    part compile-modes train.py -m +experiment=throughput $words sweep.repeats=3
    part compile-modes-smollm2_135m train.py -m +experiment=throughput $words model=smollm2_135m \
        train.block_size=1024 train.max_steps=25
}

# The tables of languages in results/README.md, on an H200 with 32 cores: 24 minutes of kernels, 24 of steps, and about 8
# of decoding. models=gpt2_124m scripts/measure.sh languages_steps measures the two tables of one model. The rows of a
# table must be of one GPU and commit, within six hours
languages() { languages_kernels; languages_steps; }
languages_kernels() {
    local -x CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0}"
    CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES%%,*}
    local model column columns # OP:SHAPE
    for model in ${models:-gpt2_124m smollm2_135m}; do
        case $model in
            gpt2_124m) columns=({norm,linear,attention,mlp,loss,adamw}:124m muon:124m_fc) ;;
            smollm2_135m) columns=({rms_norm,linear,rope,attention,glu,loss}:smollm2-135m) ;;
            *) echo "error: models=$model: choose gpt2_124m, smollm2_135m" >&2 && return 2 ;;
        esac
        for column in "${columns[@]}"; do
            python -m scripts.bench_kernels op=${column%:*} shape=${column#*:} first_call=true keep=true \
                suffix=languages out_dir="$sitting/languages-kernels/${column/:/-}"
        done
    done
}
languages_steps() {
    local -x CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0}"
    CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES%%,*}
    local model words="model.vocab_size=50304" folder="$sitting/languages-steps"
    for model in ${models:-gpt2_124m smollm2_135m}; do
        python train.py +sweep=languages model=$model $words train.block_size=1024 out_dir="$folder/$model"
        [ $? = 75 ] && return 75
        python -m scripts.generate +sweep=decoding_languages model=$model checkpoint=random \
            out_dir="$folder/$model-decoding"
        [ $? = 75 ] && return 75
    done
    python -m scripts.collect --suffix languages "$folder"/*/*/
}

# Three seeds of 301 million tokens in bf16, in fp8, and in fp8 with the head in bf16. A run takes 7 to 10 minutes on
# one GPU
fp8_curves() {
    local runs="attn=flash seed=1,2,3 train.max_steps=4600"
    long_runs fp8-curves $runs precision=bf16,fp8
    [ $? = 75 ] && return 75
    long_runs fp8-curves-head $runs precision=fp8 'kernels.fp8=[linear,mlp]'
    [ $? = 75 ] || python -m scripts.collect --beside fp8-curves --curves out/fp8-curves{,-head}/*/
}
# Two seeds of 151 million tokens with AdamW and with Muon, in bf16 and in fp8. A run takes five minutes on an H200, so
# all 16 take 80 minutes on one GPU, and 20 on four. A shorter session measures a part:
# models=gpt2_124m precisions=bf16 seeds=1 scripts/measure.sh muon_curves takes ten minutes
muon_curves() {
    local model precisions=${precisions:-bf16,fp8} seeds=${seeds:-1,2} folder
    for model in ${models:-gpt2_124m modern_124m}; do
        folder="muon/$model-precision-${precisions//,/-}-seed-${seeds//,/-}" # a comma would be a list in a sweep
        long_runs "$folder" attn=gluon model=$model seed=$seeds precision=$precisions optim=adamw,muon \
            train.max_steps=2300 train.eval_every=115
        [ $? = 75 ] && return 75
        python -m scripts.collect --beside "${beside:-h200-muon}" --curves "out/$folder"/*/
    done
}
# What a step of Muon costs, beside AdamW's on the same GPU: 36 runs of 18 s, and 12 proofs of 40 s, which also
# time optimizer.step(). precisions=bf16 scripts/measure.sh muon_steps takes half of the 20 minutes
muon_steps() {
    local into="--suffix optimizers"
    local words="model=${models:-gpt2_124m,modern_124m,smollm2_135m} train.block_size=1024 train.max_steps=25"
    words+=" precision=${precisions:-bf16,fp8} optim=adamw,muon kernels=gluon kernels.loss=triton kernels.glu=triton"
    part muon-proofs train.py -m +experiment=throughput $words attn=gluon
    part muon-steps train.py -m +experiment=throughput $words attn=gluon proof=false sweep.repeats=3
}
long_runs() { # NAME WORDS ...: a sweep. The text is this machine's Python packages
    local packages=("$(dirname "$(command -v python)")"/../lib/python3*/site-packages)
    mkdir -p out && ln -sfn "${packages[0]}" out/packages
    local corpus=(data=text 'data.path=out/packages/**/*.py' data.tokenizer=gpt2 data.encoding_errors=skip)
    python -m scripts.prepare "${corpus[@]}" || return 75
    python train.py -m "${corpus[@]}" kernels=gluon kernels.loss=triton kernels.glu=triton train.eval_batches=20 \
        train.sample_tokens=0 train.checkpoint_every=0 "${@:2}" out_dir="out/$1"
}

# Training with the default batch size; and attn=auto, after measuring its table on this GPU
typed() {
    local brief="train.max_steps=60 train.eval_every=0 train.checkpoint_every=0 train.sample_tokens=0"
    run typed kernels=gluon attn=flash $brief
}
auto() {
    python -m scripts.bench_attention auto=true lengths='[1024,16384]' rounds=3
    run auto $speed $short kernels=gluon attn=auto
}

# The longest contexts. nanoGPT reaches 131,072 tokens (eager), 196,608 (compile), and 1.9 million with Liger's loss and
# a checkpoint per block; with these two, its step of half a million tokens takes 57 s and 37.5 GiB
lean="kernels=gluon kernels.mlp=gluon_recompute attn=flash model.pos=rope"
context_checkpoints() { longest checkpoints $lean model.checkpointing=block mode=train; }
context_host() { minutes=5 longest host $lean model.checkpointing=host mode=train; }
# these two need a host with 256 GiB, and take seven minutes each
chunks="$lean model.checkpointing=chunks mode=train"
context_chunks() { minutes=5 longest chunks $chunks; }
context_chunks_two() { launch="$two" minutes=5 longest chunks-two $chunks parallel=context; }
context_triton() { longest triton kernels=triton attn=flash model.pos=rope; }
context_eager() { longest eager kernels=eager mode=train; }
context_compile() { longest compile kernels=compile mode=train; }
half_million() { sequence half-million 524288 5; }
two_million() { long_text sequence two-million 2097152 1; } # about nine minutes
long_text() { # COMMAND ...: with sotu.txt twice, because once it has too few training tokens for such a sample
    mkdir -p out && cat sotu.txt sotu.txt >out/twice.txt
    text="data=text data.path=out/twice.txt data.tokenizer=gpt2" "$@"
}
# Half a million tokens on one GPU and on two, which split the sequence; two million on two (five minutes); and the
# longest context of two
context_two() {
    sequence half-million-one 524288 5
    launch=$two sequence half-million-two 524288 5 parallel=context
    launch=$two long_text sequence two-million-two 2097152 1 parallel=context
    launch=$two minutes=5 longest host-two $lean model.checkpointing=host mode=train parallel=context
    context_chunks_two
}
sequence() { # NAME T STEPS WORDS ...
    local length="train.block_size=$2 model.block_size=$2 train.batch_size=1 train.tokens_per_step=$2"
    run "$1" $lean model.checkpointing=host model.keep_attention=true precision=bf16 $text $length \
        train.max_steps=$3 train.log_every=1 train.eval_every=0 train.checkpoint_every=0 train.sample_tokens=0 "${@:4}"
}

# Generation: every decoder with 1, 8 and 64 sequences; with prompts of 1024 tokens; with 256 sequences; 1558M; drafts;
# the longest contexts. A job takes about 20 s, and with torch.compile about two minutes, so the first group takes almost
# half an hour on one GPU
generation() { generate generation +sweep=generate checkpoint=random prompt_tokens=128; }
generation_1024() { generate generation-1024 +sweep=generate checkpoint=random prompt_tokens=1024 batch=1; }
generation_256() { generate generation-256 +sweep=generate checkpoint=random batch=256 prompt_tokens=128; }
generation_contexts() { # share of the bound over batch and context, in about eight minutes (an estimate)
    local words="checkpoint=random model.pos=rope proof=true temperature=0"
    generate generation-contexts -m $words kernels.decode=triton batch=1,8,64,256 prompt_tokens=128,1024
    # with 256 sequences the caches of the run and of its proof would take 150 GiB
    generate generation-8192 -m $words kernels.decode=triton batch=1,8,64 prompt_tokens=8192
    generate generation-persistent -m $words kernels.decode=persistent batch=1,8 prompt_tokens=128,1024,8192
}
prefills() { # 8 prompts of 1,024 tokens and 64 of 128, with the kernels of training: four minutes (an estimate)
    local size
    for size in "batch=8 prompt_tokens=1024" "batch=64 prompt_tokens=128"; do
        generate "prefills-${size//[ =]/-}" -m checkpoint=random model.block_size=2048 $size temperature=0 \
            max_new_tokens=32 proof=true kernels=eager,triton,gluon attn=sdpa,gluon kernels.decode=triton
    done
}
generation_1558m() {
    generate generation-1558m +sweep=generate checkpoint=random model=gpt2_1558m batch=1 prompt_tokens=128
}
generation_drafts() { # models of Python's standard library continue a file of this repo, without a draft and with it
    local batch train="train.py kernels=triton attn=triton precision=bf16 data.tokenizer=gpt2 train.max_steps=500"
    train+=" train.eval_every=0 train.checkpoint_every=500 train.sample_tokens=0"
    train_once drafts-model $train || return
    train_once drafts-small $train model.n_layer=3 model.n_head=4 model.n_embd=256 || return
    for batch in 1 4 16; do
        generate drafts-$batch -m checkpoint="$sitting/drafts-model" prompt="$(head -c 2000 model/gpt.py)" \
            batch=$batch max_new_tokens=256 temperature=0,0.8 proof=true kernels.decode=triton \
            generate.speculate="null,ngram,$sitting/drafts-small"
    done
}
train_once() { # NAME WORDS ...: a run that is complete is not repeated, and one that was stopped goes on
    grep -qs '"status": "ok"' "$sitting/$1/result.json" || python "${@:2}" train.resume=auto out_dir="$sitting/$1"
}
generate() { # NAME WORDS ...
    python -m scripts.generate "${@:2}" precision=bf16 out_dir="$sitting/$1"
    [ $? = 75 ] || python -m scripts.collect "$sitting/$1"/*/
}
context_generate_eager() { longest generate-eager kernels=eager mode=generate; }
context_generate_compile() { longest generate-compile kernels=compile mode=generate; }
context_generate_triton() { longest generate-triton kernels=triton attn=triton model.pos=rope mode=generate; }
context_generate_fp8() {
    longest generate-fp8 kernels=triton attn=triton model.pos=rope mode=generate generate.kv=fp8
}

# Verdicts on our kernels against torch.compile, and on FlashAttention against sdpa. Each takes about five minutes
verdicts() {
    for claim in "norm impl=triton" "mlp impl=triton" "mlp impl=gluon" "loss impl=triton" "loss impl=gluon" \
        "attention impl=flash against=sdpa"; do
        python -m scripts.judge op=$claim keep=true -- $text train.max_steps=25
    done
}

# The same norm under two names, which must be a tie, and a norm that sleeps 0.3 ms a call: its step is 5% longer
same() {
    local copy=out/same.copy
    mkdir -p $copy .cache && cp -rp train.py configs data kernels lab model runtime scripts sotu.txt .cache $copy
    echo "from kernels.norm.triton import RUNS, detail, norm, unavailable" >$copy/kernels/norm/same.py
    cat >$copy/kernels/norm/slow.py <<END
import torch
from kernels.norm import triton
from kernels.norm.triton import RUNS, detail, unavailable

def norm(*arguments, **named):
    torch.cuda._sleep(550_000)  # cycles; with 350,000 the step was 3.3% longer
    return triton.norm(*arguments, **named)
END
    (cd $copy && python train.py -m $speed $short kernels=triton attn=flash kernels.norm=triton,same,slow \
        sweep.repeats=3 out_dir=out/same)
    [ $? = 75 ] || python -m scripts.collect --beside h200-same $copy/out/same/*/
}

# Benchmarks of the ops and of attention against T, and the doctor's matrix
ops() { for op in norm mlp loss; do python -m scripts.bench_kernels op=$op keep=true; done; }
attention() { python -m scripts.bench_attention keep=true; }
support() { python -m scripts.doctor matrix=true keep=true; }

[ $# -gt 0 ] || { echo "error: name a group, for example: scripts/measure.sh presets" >&2 && exit 2; }
for group in "$@"; do
    declare -F "$group" >/dev/null || { echo "error: scripts/measure.sh has no group $group" >&2 && exit 2; }
done
for group in "$@"; do
    $group
done
