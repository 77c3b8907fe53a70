"""The promise, on small random models in float32: with drafts a greedy request gets the very tokens it gets without."""

import itertools

import pytest
import torch
from cached_forward import CachedForward
from helpers import make_request, run_to_end
from safetensors.torch import load_file, save_file
from tiny_deepseek import VOCAB_SIZE, TinyDeepseek, random_prompt

from minivllm.config import ConfigError
from minivllm.layers.embedding import VocabEmbedding
from minivllm.models.registry import load_model, load_mtp
from minivllm.speculate.drafter import CachedProposer

MAX_MODEL_LEN = 48
MARGIN = 1e-3
METHODS = ["ngram", "draft_model", "mtp"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return TinyDeepseek.save(tmp_path_factory.mktemp("target"), mtp_layers=1)


@pytest.fixture(scope="module")
def draft_path(tiny, tmp_path_factory):
    """The target with a little noise: most of its drafts are right, some are not."""
    path = tmp_path_factory.mktemp("draft")
    generator = torch.Generator().manual_seed(5)
    tensors = load_file(tiny.path / "model.safetensors")
    for tensor in tensors.values():
        tensor += 0.03 * tensor.std() * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text((tiny.path / "config.json").read_text())
    return path


@pytest.fixture(autouse=True)
def no_placeholder_is_embedded(monkeypatch):
    embed = VocabEmbedding.forward

    def checked(self, input_ids):
        assert input_ids.numel() == 0 or (input_ids.min() >= 0 and input_ids.max() < len(self.weight))
        return embed(self, input_ids)

    monkeypatch.setattr(VocabEmbedding, "forward", checked)


def settings_for(method, k, draft_path, **more):
    model = {"model": str(draft_path)} if method == "draft_model" else {}
    lookup = {"prompt_lookup_min": 1} if method == "ngram" else {}
    return {"speculative_config": {"method": method, "num_speculative_tokens": k, **model, **lookup, **more}}


def requests_for(answers: list[list[int]] | None = None):
    """Requests that end in every way. `answers` are the plain greedy ids, from which EOS and stop tokens are taken."""
    beginning = random_prompt(17, seed=0)
    loop = random_prompt(8, seed=16)

    def nth(index, place):
        return answers[index][place] if answers else VOCAB_SIZE - 1

    return [
        make_request("plain", beginning, max_tokens=14),
        make_request("eos", [*beginning, 5], eos=(nth(1, 5),), max_tokens=14),
        make_request("min", [*beginning, 6], eos=(nth(2, 3),), min_tokens=9, max_tokens=14),
        make_request("short", loop * 4, max_tokens=13),
        make_request("full", random_prompt(39, seed=2), max_tokens=40),
        make_request("stop", random_prompt(3, seed=3), stop_token_ids=[nth(5, 6)], max_tokens=14),
        make_request("penalties", loop * 2, repetition_penalty=1.4, frequency_penalty=0.5, max_tokens=12),
        make_request("one", random_prompt(16, seed=6), max_tokens=1),
    ]


def engine(tiny, crowded=False, **settings):
    """With room for everybody, or for one request of max_model_len and a little more."""
    pool = {"block_size": 8, "max_model_len": MAX_MODEL_LEN, "num_gpu_blocks_override": 10 if crowded else 64}
    return tiny.engine(**pool, **settings)


def alone(tiny, requests):
    """What each gets without drafts and without company, no close call among the choices."""
    core = engine(tiny, enable_prefix_caching=False)
    sampler = core.worker.sampler

    def checked(logits, metadata):
        ids = sampler(logits, metadata)
        best_two = logits.topk(2).values
        assert (best_two[:, 0] - best_two[:, 1]).min() > MARGIN, "a close call: choose other prompts"
        return ids

    core.worker.sampler = checked
    for request in requests:
        run_to_end(core, [request])
    return {request.request_id: (request.output_token_ids, request.status) for request in requests}


@pytest.fixture(scope="module")
def answers(tiny):
    plain = alone(tiny, requests_for())
    return [ids for ids, _ in plain.values()]


@pytest.fixture(scope="module")
def expected(tiny, answers):
    return alone(tiny, requests_for(answers))


def draft_well(core, expected):
    """Random MTP layers and random texts give no right drafts: most are replaced by what the target will say."""
    proposer = core.worker.proposer
    calls = itertools.count()
    if not isinstance(proposer, CachedProposer):
        proposer.propose = well_looked_up(proposer, expected, calls)
        return
    choose = proposer._choose

    def half_right(step, rows, index, logits):
        ids, q = choose(step, rows, index, logits)
        name_of = {state.row: req_id for req_id, state in step.batch.states.items()}
        for place, row in enumerate(rows):
            known = int(step.batch.num_tokens[row] - step.batch.num_prompt_tokens[row]) + index
            answer = expected[name_of[row]][0]
            if next(calls) % 4 and known < len(answer):
                ids[place] = answer[known]
        return ids, q

    proposer._choose = half_right


def well_looked_up(proposer, expected, calls):
    propose = proposer.propose

    def half_right(step):
        drafts = propose(step)
        for index, most in zip(step.inputs.sampled, step.most_drafts(proposer.k), strict=True):
            state = step.inputs.states[index]
            known = int(step.batch.num_tokens[state.row]) - state.num_prompt_tokens
            answer = expected[state.req_id][0][known : known + int(most)]
            if answer and next(calls) % 4:
                drafts.token_ids[state.req_id] = [token if next(calls) % 4 else 3 for token in answer]
        return drafts

    return half_right


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("chunk_size", [0, 5])
@pytest.mark.parametrize("k", range(6))
@pytest.mark.parametrize("method", METHODS)
def test_greedy_ids_are_those_without_drafts(
    tiny, draft_path, answers, expected, method, k, chunk_size, crowded, caching
):
    core = engine(
        tiny, crowded, long_prefill_token_threshold=chunk_size, enable_prefix_caching=caching,
        **settings_for(method, k, draft_path),
    )  # fmt: skip
    if method != "draft_model" and k:
        draft_well(core, expected)
    requests = requests_for(answers)
    manager = core.scheduler.kv_cache_manager

    def check_names():
        for request in core.scheduler.running:
            named = [block.block_hash for block in manager._tables[request.request_id].blocks if block.block_hash]
            assert len(named) * 8 <= request.num_tokens, "a draft is part of a name"
            assert 0 <= request.num_computed_tokens < request.num_tokens
            assert request.num_output_placeholders == 0

    results = run_to_end(core, requests, check_names)
    assert {r.request_id: (results[r.request_id].token_ids, r.status) for r in requests} == expected
    assert (sum(request.num_preemptions for request in requests) > 0) == crowded
    accepted = sum(request.spec_decode.num_accepted for request in requests)
    assert accepted > 0 if k else accepted == 0
    if k:
        assert accepted < sum(request.spec_decode.num_drafted for request in requests), "some draft should be wrong"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("budget", [20, 33])
def test_a_budget_that_cuts_drafts_and_a_request_alone_give_the_same(
    tiny, draft_path, answers, expected, method, budget
):
    options = settings_for(method, 3, draft_path)
    core = engine(tiny, max_num_batched_tokens=budget, max_num_seqs=budget // 4, **options)
    results = run_to_end(core, requests_for(answers))
    assert {name: result.token_ids for name, result in results.items()} == {n: ids for n, (ids, _) in expected.items()}
    for request in requests_for(answers):
        run_to_end(core, [request])
        assert request.output_token_ids == expected[request.request_id][0]


@pytest.mark.parametrize("in_flight", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_whoever_is_preempted_whenever_gets_the_same_tokens(tiny, draft_path, answers, expected, method, in_flight):
    core = engine(tiny, **settings_for(method, 3, draft_path))
    if method != "draft_model":
        draft_well(core, expected)
    requests = requests_for(answers)
    for request in requests:
        core.add_request(request)
    scheduler = core.scheduler
    for step in itertools.count():
        if not core.has_unfinished_requests():
            break
        message = scheduler.schedule() if in_flight else None
        if scheduler.running and step % 2 and step < 20:
            scheduler.preempt(scheduler.running[step // 2 % len(scheduler.running)])
        message = message or scheduler.schedule()
        scheduler.update_from_output(message, core.worker.execute_model(message))
        scheduler.kv_cache_manager.check_invariants()
    assert {r.request_id: (r.output_token_ids, r.status) for r in requests} == expected
    assert sum(request.num_preemptions for request in requests) >= 3


@pytest.mark.parametrize("method", ["draft_model", "mtp"])
@pytest.mark.parametrize("chunk_size", [0, 5])
def test_drafters_never_read_a_slot_that_nobody_wrote(tiny, draft_path, answers, method, chunk_size):
    """NaN in the drafter's cache changes no draft: with shared beginnings, chunks and preemptions."""
    histories = []
    for fill in (0.0, torch.nan):
        core = engine(tiny, True, long_prefill_token_threshold=chunk_size, **settings_for(method, 3, draft_path))
        for cache in core.worker.proposer.cache.tensors.values():
            cache.fill_(fill)
        execute, history = core.worker.execute_model, []

        def recorded(message, execute=execute, history=history):
            output = execute(message)
            history.append((output.draft_token_ids, output.sampled_token_ids))
            return output

        core.worker.execute_model = recorded
        for _ in range(2):
            run_to_end(core, requests_for(answers))
        assert core.scheduler.kv_cache_manager.prefix_cache_stats.hits > 0
        histories.append(history)
    assert histories[0] == histories[1]


@pytest.mark.parametrize("k", [1, 3])
def test_the_target_as_its_own_draft_model_is_always_right(tiny, k):
    """Every draft of a full verification is accepted, so [d_k, bonus] are read, and the cache has no hole."""
    core = engine(tiny, **settings_for("draft_model", k, tiny.path))
    request = make_request("a", random_prompt(9, seed=1), max_tokens=20)
    run_to_end(core, [request])
    stats = request.spec_decode
    assert stats.num_accepted == stats.num_drafted > 0
    assert stats.mean_acceptance_length > k / 2 + 1


@pytest.mark.parametrize("min_tokens", range(2, 9))
def test_min_tokens_are_counted_row_by_row_within_a_verification(tiny, answers, min_tokens):
    """Each row of a verification has its own count of outputs: a stop is banned in one and allowed in the next."""
    stop = answers[0][5]
    params = {"stop_token_ids": [stop], "min_tokens": min_tokens, "max_tokens": 12}
    outputs = []
    for settings in ({}, settings_for("draft_model", 5, tiny.path)):
        request = make_request("a", random_prompt(17, seed=0), **params)
        run_to_end(engine(tiny, **settings), [request])
        outputs.append(request.output_token_ids)
    assert outputs[0] == outputs[1]
    assert (outputs[0][-1] == stop and len(outputs[0]) == 6) == (min_tokens <= 5)


@pytest.mark.parametrize("chunk_size", [0, 4])
def test_first_mtp_drafts_are_those_of_one_pass_over_the_whole_text(tiny, answers, expected, chunk_size):
    core = engine(tiny, long_prefill_token_threshold=chunk_size, **settings_for("mtp", 3, None))
    draft_well(core, expected)
    own, choose = {}, core.worker.proposer._choose
    plain = CachedProposer._choose

    def recorded(step, rows, index, logits):
        if index == 0:
            name_of = {state.row: req_id for req_id, state in step.batch.states.items()}
            first, _ = plain(core.worker.proposer, step, rows, index, logits)
            for row, token in zip(rows, first.tolist(), strict=True):
                own[name_of[row], int(step.batch.num_tokens[row])] = token
        return choose(step, rows, index, logits)

    core.worker.proposer._choose = recorded
    requests = requests_for(answers)
    run_to_end(core, requests)
    target, config = load_model(tiny.path)
    mtp = load_mtp(tiny.path, target, config)
    checked = 0
    for request in requests:
        ids = torch.tensor(request.all_token_ids)
        logits = whole_pass(tiny, mtp, ids)
        for (name, num_tokens), token in own.items():
            if name == request.request_id and num_tokens <= len(ids):
                row = logits[num_tokens - 2]
                assert row.max() - row[token] < MARGIN
                checked += 1
    assert checked > 20


def whole_pass(tiny, mtp, ids):
    """MTP logits [len(ids) - 1, V] of a text, teacher forced; row i drafts the token at i + 2."""
    with torch.inference_mode():
        hidden = tiny.model.model(ids[None]).last_hidden_state[0]
    cached = CachedForward(mtp.attention_layers())
    out = cached.run(lambda p: mtp(ids[1:], p, hidden[:-1]), 0, len(ids) - 1)
    with torch.inference_mode():
        return mtp.compute_logits(out)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sample", ["greedy", "probabilistic"])
def test_a_seed_reproduces_its_run_whatever_the_company(tiny, draft_path, method, sample):
    options = settings_for(method, 3, draft_path, draft_sample_method=sample)
    params = [
        {"temperature": 0.4},
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 5, "logprobs": 1},
        {"temperature": 0.7, "top_p": 0.9, "presence_penalty": 0.4},
        {"temperature": 1.0, "min_p": 0.1},
    ]

    def requests():
        return [
            make_request(str(i), random_prompt(6, seed=i) * 2, max_tokens=16, **{**own, "seed": 40 + i})
            for i, own in enumerate(params)
        ]

    together = requests()
    run_to_end(engine(tiny, **options), together)
    for request, other in zip(requests(), together, strict=True):
        result = run_to_end(engine(tiny, **options), [request])[request.request_id]
        assert request.output_token_ids == other.output_token_ids
        assert len(result.logprobs) == (16 if request.sampling_params.logprobs is not None else 0)
    assert together[1].output_token_ids == tiny.greedy(together[1].prompt_token_ids, 16)[0]


@pytest.mark.parametrize("method", METHODS)
def test_logprobs_are_the_raw_models_one_row_for_each_emitted_token(tiny, draft_path, method):
    core = engine(tiny, **settings_for(method, 4, draft_path))
    request = make_request("a", random_prompt(5, seed=4) * 4, logprobs=2, max_tokens=14, repetition_penalty=1.2)
    result = run_to_end(core, [request])["a"]
    logprobs = tiny.logits(request.all_token_ids).log_softmax(-1)[request.num_prompt_tokens - 1 :]
    assert len(result.logprobs) == len(result.token_ids) == 14
    for entry, row, token in zip(result.logprobs, logprobs, result.token_ids, strict=False):
        assert entry.token_ids[0] == token
        assert entry.logprobs[0] == pytest.approx(row[token].item(), abs=1e-3)


def test_the_kernels_verify_as_pytorch_does(tiny, draft_path):
    """In the interpreter: padding in front, slots of -1, drafts in decode rows, a chunk beside them."""
    outputs = []
    for backend in ("torch", "reference", "triton"):
        core = tiny.engine(
            block_size=16, max_model_len=32, num_gpu_blocks_override=8, attention_backend=backend,
            device="cuda" if torch.cuda.is_available() else "cpu", long_prefill_token_threshold=6,
            **settings_for("draft_model", 2, draft_path),
        )  # fmt: skip
        requests = [
            make_request(str(i), random_prompt(length, seed=i), max_tokens=5) for i, length in enumerate((1, 9))
        ]
        run_to_end(core, requests)
        outputs.append([request.output_token_ids for request in requests])
        assert sum(request.spec_decode.num_accepted for request in requests) > 0
    assert outputs[0] == outputs[1] == outputs[2]


def test_a_drafters_cache_counts_in_the_bytes_of_a_block(tiny, draft_path):
    layer_bytes = 8 * (32 + 16) * 4
    sizes = [engine(tiny, **settings_for(m, 2, draft_path)).worker.bytes_per_block for m in METHODS]
    assert sizes == [3 * layer_bytes, 6 * layer_bytes, 4 * layer_bytes]


def test_what_cannot_speculate_is_refused_by_name(tiny, tmp_path):
    other = TinyDeepseek.save(tmp_path / "other", vocab_size=VOCAB_SIZE + 8)
    for path, message in (
        (other.path, r"the vocabularies differ: .* vocab_size 168, the target 160"),
        (tmp_path / "nowhere", "the draft model is missing or unusable"),
    ):
        with pytest.raises(ConfigError, match=message):
            engine(tiny, **settings_for("draft_model", 2, path))
    with pytest.raises(ValueError, match="has no MTP layers"):
        engine(other, **settings_for("mtp", 2, None))
