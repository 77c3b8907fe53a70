"""Requests, drafts and situations that pipelines of every kind are tried with, on a small random model."""

import itertools

from helpers import Finished, make_request, run_to_end, step_checked
from safetensors.torch import load_file, save_file
from tiny_deepseek import TinyDeepseek, random_prompt

from minivllm.engine.batch_queue import PipelineCore
from minivllm.engine.core import EngineCore
from minivllm.speculate.proposer import Drafts
from minivllm.worker.pipeline import InProcessPipeline

MARGIN = 1e-3
BLOCK_SIZE, MAX_MODEL_LEN = 8, 32
LIMITS = {"block_size": BLOCK_SIZE, "max_model_len": MAX_MODEL_LEN, "num_gpu_blocks_override": 48, "max_num_seqs": 8}
METHODS = ("ngram", "mtp", "draft_model")
SITUATIONS = ("chunks", "preemption", "prefix caching", "aborts")
CASES = [(None, 0), *itertools.product(METHODS, range(5))]


def save_models(folder):
    """A target of 4 layers with an MTP layer, and a draft model that is mostly of the same mind."""
    import torch

    small = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_attention_heads": 2,
             "num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "q_lora_rank": 16,
             "kv_lora_rank": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_hidden_layers": 4,
             "first_k_dense_replace": 3}  # fmt: skip
    tiny = TinyDeepseek.save(folder / "target", mtp_layers=1, **small)
    draft = folder / "draft"
    draft.mkdir()
    tensors = load_file(tiny.path / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    for tensor in tensors.values():
        tensor += 0.03 * tensor.std() * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
    (draft / "config.json").write_text((tiny.path / "config.json").read_text())
    return tiny, draft


def speculative_config(method, k, draft_path):
    if method is None:
        return None
    more = {"draft_model": {"model": str(draft_path)}, "ngram": {"prompt_lookup_min": 1}}.get(method, {})
    return {"method": method, "num_speculative_tokens": k, **more}


def requests():
    """Lengths that end within, at and behind blocks and chunks; two share a beginning, and one fills max_model_len."""
    shared = random_prompt(17, seed=30)
    return [
        make_request("a", shared, max_tokens=7),
        make_request("b", [*shared, 9], max_tokens=6),
        make_request("c", random_prompt(3, seed=31), max_tokens=9),
        make_request("full", random_prompt(24, seed=32), max_tokens=99),
        make_request("one", random_prompt(5, seed=34), max_tokens=1),
    ]


def alone(tiny):
    """Plain greedy ids of each request without company, by its id; no close call among the choices."""
    core = tiny.engine(**LIMITS)
    sampler = core.worker.sampler

    def checked(logits, metadata):
        best_two = logits.topk(2).values
        assert (best_two[:, 0] - best_two[:, 1]).min() > MARGIN, "a close call: choose other prompts"
        return sampler(logits, metadata)

    core.worker.sampler = checked
    answers = {}
    for request in requests():
        run_to_end(core, [request])
        answers[request.request_id] = request.output_token_ids
    return answers


def draft_well(runner, answers):
    """Random layers and random texts give no right drafts: three of four are replaced by what the target will say."""
    proposer, calls = runner.proposer, itertools.count()
    propose = proposer.propose

    def mostly_right(step):
        proposed = propose(step)
        token_ids = dict(proposed.token_ids)
        for index, most in zip(step.inputs.sampled, step.most_drafts(proposer.k), strict=True):
            state = step.inputs.states[index]
            known = int(step.batch.num_tokens[state.row]) - state.num_prompt_tokens
            answer = answers[state.req_id][known : known + int(most)]
            if answer:
                token_ids[state.req_id] = [token if next(calls) % 4 else 3 for token in answer]
        return Drafts(token_ids)

    proposer.propose = mostly_right


def pipeline_core(config, worker, situation):
    """An engine around a worker that has run others before; room for everybody, or for one and a little more."""
    config.long_prefill_token_threshold = 5 if situation == "chunks" else 0
    config.enable_prefix_caching = situation != "preemption"
    num_blocks = -(-MAX_MODEL_LEN // BLOCK_SIZE) + 2 if situation == "preemption" else worker.num_blocks
    worker.reset()
    make = EngineCore if config.world_size == 1 and not isinstance(worker, InProcessPipeline) else PipelineCore
    return make(config, worker, num_blocks, worker.max_model_len, worker.block_size)


def run_situation(core, situation, answers):
    """Run the requests; returns them, after checking that each got what it gets alone."""
    asked = requests()
    if situation == "aborts":
        run_with_aborts(core, asked, answers)
        return asked
    steps = itertools.count(1)

    def preempt_now_and_then():
        running = core.scheduler.running
        if situation == "preemption" and running and next(steps) in (2, 3, 5, 8):
            core.scheduler.preempt(running[next(steps) % len(running)])

    results = run_to_end(core, asked, preempt_now_and_then)
    assert {name: result.token_ids for name, result in results.items()} == answers
    assert all(results[name].finish_reason == "length" for name in answers)
    if situation == "preemption":
        assert sum(request.num_preemptions for request in asked) > 1
    if situation == "prefix caching":
        again = requests()[:2]
        assert all(result.token_ids == answers[name] for name, result in run_to_end(core, again).items())
        assert sum(request.num_cached_tokens for request in again) > 0
    return asked


def run_with_aborts(core, asked, answers):
    """Requests are aborted while steps of theirs are on their way, and their ids are given to others at once."""
    results: dict[str, Finished] = {}
    for request in asked:
        core.add_request(request)
    num_aborted = 0
    while core.has_unfinished_requests():
        step_checked(core, results)
        if num_aborted < 2 and len(results) > 2 and core.scheduler.running:
            victim = core.scheduler.running[0].request_id
            core.abort_requests([victim])
            so_far = results.pop(victim, Finished()).token_ids
            assert so_far == answers[victim][: len(so_far)]
            core.add_request(next(r for r in requests() if r.request_id == victim))
            num_aborted += 1
    assert num_aborted == 2
    assert {name: result.token_ids for name, result in results.items()} == answers
