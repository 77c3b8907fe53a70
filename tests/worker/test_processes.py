"""A process a rank, over gloo: the same ids; and what becomes of the others when one dies."""

import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Pipe

import pytest
from helpers import run_to_end
from pipeline_cases import BLOCK_SIZE, LIMITS, MAX_MODEL_LEN, alone, requests, save_models, speculative_config

from minivllm import LLM, SamplingParams
from minivllm.config import ConfigError, EngineConfig
from minivllm.engine.batch_queue import PipelineCore, StageDied
from minivllm.worker.executor import choose_backend
from minivllm.worker.process_pipeline import ProcessPipeline
from minivllm.worker.processes import StageProcesses

SHIPPED = ("tiny-deepseek", "tiny-qwen3")
DRAFTS = [None, ("ngram", 3), ("mtp", 2), ("draft_model", 3)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def answers(models):
    return alone(models[0])


@pytest.fixture(scope="module")
def two():
    processes = StageProcesses.start(2)
    yield processes
    processes.close()
    assert [process.exitcode for process in processes.processes] == [0, 0]


@pytest.fixture(scope="module")
def four():
    processes = StageProcesses.start(4)
    yield processes
    processes.close()
    assert [process.exitcode for process in processes.processes] == [0] * 4


def core_on(processes, path, pp, tp, **settings):
    config = EngineConfig(
        str(path), dtype="float32", device="cpu", pipeline_parallel_size=pp, tensor_parallel_size=tp, **settings
    )
    worker = ProcessPipeline(config, str(path), processes)
    return PipelineCore(config, worker, worker.num_blocks, worker.max_model_len, worker.block_size)


@pytest.mark.parametrize("drafts", DRAFTS, ids=str)
@pytest.mark.parametrize(("pp", "tp", "feedback"), [(2, 1, "scheduler"), (2, 1, "broadcast"), (1, 2, "scheduler"),
                                                    (2, 2, "scheduler"), (2, 2, "broadcast")])  # fmt: skip
def test_greedy_ids_are_those_of_one_process(request, models, answers, pp, tp, feedback, drafts):
    processes = request.getfixturevalue("two" if pp * tp == 2 else "four")
    method, k = drafts or (None, 0)
    settings = {**LIMITS, "speculative_config": speculative_config(method, k, models[1]), "pp_token_feedback": feedback}
    core = core_on(processes, models[0].path, pp, tp, long_prefill_token_threshold=5, **settings)
    for num_blocks in (LIMITS["num_gpu_blocks_override"], -(-MAX_MODEL_LEN // BLOCK_SIZE) + 1):
        core.num_blocks = num_blocks
        core.scheduler = core._make_scheduler()
        core.worker.reset()
        core.queue.clear()
        core._num_booked = 0
        results = run_to_end(core, requests())
        assert {name: result.token_ids for name, result in results.items()} == answers


def shipped(name):
    from minivllm.bench.parallel import MARGIN, reference

    answers, margins = reference(name, num_prompts=3, num_tokens=12)
    assert min(margins.values()) > MARGIN, "a close call: choose other prompts"
    return answers


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize(("pp", "tp"), [(2, 1), (1, 2), (2, 2)])
def test_shipped_models_give_the_same_text(request, name, pp, tp):
    from minivllm.bench.parallel import ids_of, methods_of

    answers = shipped(name)
    processes = request.getfixturevalue("two" if pp * tp == 2 else "four")
    for method in methods_of(name):
        core = core_on(processes, *_path_and_sizes(name, pp, tp), **method)
        assert ids_of(core, answers, num_tokens=12) == answers


def _path_and_sizes(name, pp, tp):
    from minivllm.checkpoints import resolve

    return resolve(name), pp, tp


def test_a_reset_in_mid_flight_leaves_the_ranks_in_step(two, models, answers):
    core = core_on(two, models[0].path, 2, 1, pp_token_feedback="broadcast", **LIMITS)
    collect = core.worker.collect
    for num_steps in (1, 2, 5):
        for request in requests():
            core.add_request(request)
        for _ in range(num_steps):
            core.step()
        core.worker.collect = lambda: (_ for _ in ()).throw(KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            core.step()
        core.worker.collect = collect
    assert {name: r.token_ids for name, r in run_to_end(core, requests()).items()} == answers


def are_gone(pids, seconds=5.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(os.path.exists(f"/proc/{pid}") for pid in pids):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(("victim", "number"), [(0, signal.SIGKILL), (1, signal.SIGSEGV)])
def test_the_engine_says_which_stage_was_killed(models, victim, number):
    llm = LLM(str(models[0].path), dtype="float32", device="cpu", skip_tokenizer_init=True, pipeline_parallel_size=2,
              max_model_len=256)  # fmt: skip
    processes = llm.engine.worker.processes.processes
    pids = [process.pid for process in processes]
    stream = llm.stream([1, 2, 3], SamplingParams(temperature=0, max_tokens=240, ignore_eos=True))
    next(stream)
    os.kill(pids[victim], number)
    start = time.monotonic()
    with pytest.raises(StageDied, match=f"stage {victim} of 2 has died: signal {number.name}"):
        list(stream)
    assert time.monotonic() - start < 10 and are_gone(pids)
    with pytest.raises(StageDied, match=f"stage {victim} of 2 has died"):
        llm.generate([1, 2, 3], use_tqdm=False)


def test_an_exception_comes_with_its_traceback(models):
    processes = StageProcesses.start(2)
    core = core_on(processes, models[0].path, 2, 1, **LIMITS)
    request = requests()[0]
    core.add_request(request)
    core.step()
    processes.send(1, ("nonsense",))
    with pytest.raises(StageDied, match=r"(?s)stage 1 of 2 has died of an exception:.*Traceback.*has sent 'nonsense'"):
        while core.has_unfinished_requests():
            core.step()
    assert are_gone([process.pid for process in processes.processes])


def test_a_refusal_of_one_rank_reaches_the_caller_as_it_is(models):
    with pytest.raises(ValueError, match="pipeline_parallel_size is 5, but the model has 4 layers"):
        LLM(str(models[0].path), device="cpu", skip_tokenizer_init=True, pipeline_parallel_size=5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nobody_is_left_behind(models, number, tmp_path):
    """Ctrl-C of the whole foreground group, and a kill of the engine alone."""
    script = tmp_path / "endless.py"
    script.write_text(
        "from minivllm import LLM, SamplingParams\n"
        "if __name__ == '__main__':\n"
        f"    llm = LLM({str(models[0].path)!r}, device='cpu', skip_tokenizer_init=True, pipeline_parallel_size=2)\n"
        "    print(*[process.pid for process in llm.engine.worker.processes.processes], flush=True)\n"
        "    while True:\n"
        "        llm.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=200), use_tqdm=False)\n"
    )
    engine = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              start_new_session=True)  # fmt: skip
    pids = [int(pid) for pid in engine.stdout.readline().split()]
    assert len(pids) == 2
    time.sleep(0.3)
    if number == signal.SIGINT:
        os.killpg(engine.pid, number)
    else:
        engine.kill()
    _, errors = engine.communicate(timeout=20)
    assert are_gone(pids), "stages outlive their engine"
    assert number != signal.SIGINT or "KeyboardInterrupt" in errors


def test_torchrun_starts_the_ranks_and_only_the_first_writes(models, tmp_path):
    script = tmp_path / "run.py"
    script.write_text(
        "import sys\n"
        "from minivllm import LLM, SamplingParams\n"
        f"llm = LLM({str(models[0].path)!r}, dtype='float32', device='cpu', skip_tokenizer_init=True,\n"
        "          pipeline_parallel_size=2)\n"
        f"prompt = {requests()[0].prompt_token_ids}\n"
        "params = SamplingParams(temperature=0, max_tokens=7)\n"
        "print(llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == [str(alone(models[0])["a"])]


def test_the_engine_waits_for_the_rank_that_is_a_thread_of_its_own():
    """A thread that is in PyTorch when the interpreter ends would abort the process (seen under torchrun)."""
    ours, theirs = Pipe()
    ended = []

    def serve_slowly():
        assert theirs.recv() == ("close",)
        time.sleep(0.2)  # the rest of a step
        ended.append(True)

    thread = threading.Thread(target=serve_slowly, daemon=True)
    thread.start()
    StageProcesses([ours], [None], own_rank=thread).close()
    assert ended == [True]


def test_a_pipeline_that_its_own_rank_collects_is_ended():
    ours, theirs = Pipe()
    begin, failures = threading.Event(), []

    def serve_and_collect():
        begin.wait(5)
        try:
            held.pop().close()
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=serve_and_collect, daemon=True)
    thread.start()
    held = [StageProcesses([ours], [None], own_rank=thread)]
    begin.set()
    thread.join(5)
    assert failures == [] and ours.closed and theirs.recv() == ("close",)


def test_sizes_that_torchrun_does_not_have_are_refused(monkeypatch):
    config = EngineConfig("m", pipeline_parallel_size=2, tensor_parallel_size=2)
    assert choose_backend(config) == "mp"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=r"torchrun has started 3 processes, but .* is 4: start 4"):
        choose_backend(config)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    config.distributed_executor_backend = "torchrun"
    with pytest.raises(ConfigError, match="needs processes that torchrun has started"):
        choose_backend(config)
