"""Each processor beside a version of it that handles one row in a loop, and the draw beside a plain running sum."""

import math
from itertools import pairwise

import pytest
import torch

from minivllm.sample.random import Purpose, uniform
from minivllm.sample.sampler import PenaltyRow, Sampler, SamplingMetadata, apply_penalties, draw, probabilities

JUST_UNDER_1 = 1 - 2**-53


def metadata(temperature, top_k=0, top_p=1.0, min_p=0.0, seeds=0, positions=0, **more) -> SamplingMetadata:
    """Rows from lists, one entry a row; a lone number holds for all rows. Flags are what the runner computes."""
    count = len(temperature)

    def rows(value, dtype):
        return torch.tensor(value if isinstance(value, list) else [value] * count, dtype=dtype)

    tensors = {
        "temperature": rows(temperature, torch.float32),
        "top_k": rows(top_k, torch.int64),
        "top_p": rows(top_p, torch.float32),
        "min_p": rows(min_p, torch.float32),
        "seeds": rows(seeds, torch.int64),
        "positions": rows(positions, torch.int64),
    }
    is_random = tensors["temperature"] > 0
    random_top_k = tensors["top_k"][is_random]
    return SamplingMetadata(
        **tensors,
        all_greedy=not is_random.any(),
        all_random=bool(is_random.all()),
        max_top_k=int(random_top_k.max()) if len(random_top_k) and random_top_k.all() else 0,
        any_top_k=bool(random_top_k.any()),
        any_top_p=bool((tensors["top_p"] < 1)[is_random].any()),
        any_min_p=bool((tensors["min_p"] > 0)[is_random].any()),
        **more,
    )


def naive_probabilities(logits: list[float], temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> list[float]:
    """One row, in the order that SamplingParams names; tokens that tie with the last one kept are kept."""
    scaled = [x / temperature for x in logits]

    def softmax(kept):
        largest = max(scaled[i] for i in kept)
        weight = {i: math.exp(scaled[i] - largest) for i in kept}
        return {i: w / sum(weight.values()) for i, w in weight.items()}

    kept = list(range(len(scaled)))
    p = softmax(kept)
    kept = [i for i in kept if p[i] >= min_p * max(p.values()) * (1 - 1e-6)]
    if top_k:
        smallest = sorted((scaled[i] for i in kept), reverse=True)[:top_k][-1]
        kept = [i for i in kept if scaled[i] >= smallest]
    p = softmax(kept)
    if top_p < 1:
        total, nucleus = 0.0, []
        for i in sorted(kept, key=lambda i: -scaled[i]):
            if nucleus and total >= top_p:
                break
            nucleus.append(i)
            total += p[i]
        kept = [i for i in kept if scaled[i] >= scaled[nucleus[-1]]]
    p = softmax(kept)
    return [p.get(i, 0.0) for i in range(len(scaled))]


class TestProbabilities:
    SETTINGS = [  # noqa: RUF012
        {},
        {"temperature": 0.3},
        {"temperature": 2.5},
        {"top_k": 1},
        {"top_k": 5},
        {"top_k": 500},
        {"top_p": 1e-6},
        {"top_p": 0.35},
        {"top_p": 0.99},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"top_k": 7, "top_p": 0.6},
        {"top_k": 20, "min_p": 0.05, "temperature": 1.7},
        {"top_k": 9, "top_p": 0.8, "min_p": 0.02, "temperature": 0.7},
    ]

    @pytest.mark.parametrize("setting", SETTINGS)
    @pytest.mark.parametrize("vocab_size", [1, 2, 300])
    def test_one_row_equals_the_naive_version(self, setting, vocab_size):
        logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3
        given = {name: [value] for name, value in {"temperature": 1.0, **setting}.items()}
        got = probabilities(logits, metadata(**given))[0]
        # float32 softmax over at most 300 tokens: a few units in the last place, 1.2e-7 each
        expected = torch.tensor(naive_probabilities(logits[0].tolist(), **setting))
        assert torch.equal(got > 0, expected > 0)
        torch.testing.assert_close(got, expected, rtol=3e-6, atol=1e-9)

    def test_rows_of_one_batch_may_ask_for_different_things(self):
        logits = torch.randn(len(self.SETTINGS), 300, generator=torch.Generator().manual_seed(1)) * 3
        full = [{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **setting} for setting in self.SETTINGS]
        together = probabilities(logits, metadata(**{name: [s[name] for s in full] for name in full[0]}))
        for row, setting in enumerate(full):
            alone = probabilities(logits[row : row + 1], metadata(**{k: [v] for k, v in setting.items()}))
            torch.testing.assert_close(together[row], alone[0], rtol=1e-6, atol=1e-9)

    def test_a_mix_of_short_and_long_top_k_keeps_what_each_row_asks_for(self):
        logits = torch.arange(100.0).repeat(3, 1)
        p = probabilities(logits, metadata([1.0] * 3, top_k=[1, 50, 3]))
        assert (p > 0).sum(dim=-1).tolist() == [1, 50, 3]

    def test_tokens_that_tie_with_the_last_one_kept_stay(self):
        logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
        p = probabilities(logits, metadata([1.0], top_k=[2]))
        assert (p[0] > 0).tolist() == [True, True, True, True, False]
        p = probabilities(torch.zeros(1, 4), metadata([1.0], top_p=[0.3]))
        assert p[0].tolist() == [0.25] * 4

    def test_top_k_is_applied_before_top_p(self):
        logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
        # Of the top two, renormalised to .625 and .375, the first alone has the mass of .6; of all three it has not.
        assert (probabilities(logits, metadata([1.0], top_k=[2], top_p=[0.6]))[0] > 0).tolist() == [True, False, False]
        assert (probabilities(logits, metadata([1.0], top_p=[0.6]))[0] > 0).tolist() == [True, True, False]

    def test_min_p_compares_after_the_temperature(self):
        logits = torch.tensor([[0.6, 0.2, 0.2]]).log()
        assert (probabilities(logits, metadata([1.0], min_p=[0.5]))[0] > 0).tolist() == [True, False, False]
        assert (probabilities(logits, metadata([4.0], min_p=[0.5]))[0] > 0).tolist() == [True, True, True]

    def test_a_top_p_that_float32_rounds_to_zero_keeps_the_most_likely_token(self):
        p = probabilities(torch.tensor([[1.0, 3.0, 2.0]]), metadata([1.0], top_p=[1e-60]))
        assert p.tolist() == [[0, 1, 0]]

    def test_tokens_masked_before_stay_masked(self):
        logits = torch.tensor([[-math.inf, 1.0, -math.inf, 0.0]])
        for setting in ({"top_k": [3]}, {"top_p": [0.9999]}, {"min_p": [1e-9]}, {}):
            p = probabilities(logits, metadata([1.0], **setting))
            assert (p[0] > 0).tolist() == [False, True, False, True]

    @pytest.mark.parametrize("temperature", [1e-5, 1e-20, 1e-37, 1e-39, 1e-45])
    def test_a_tiny_temperature_leaves_only_the_largest_logit(self, temperature):
        logits = torch.tensor([[50.0, -3.0, 49.0], [-50.0, -3.0, -49.0], [0.0, 0.0, -1.0]])
        p = probabilities(logits, metadata([temperature] * 3, min_p=[0.1, 0.0, 0.0]))
        assert p.tolist() == [[1, 0, 0], [0, 1, 0], [0.5, 0.5, 0]]

    def test_a_huge_temperature_makes_all_tokens_alike(self):
        p = probabilities(torch.tensor([[50.0, -3.0, 49.0, 0.0]]), metadata([1e30]))
        assert p.tolist() == [[0.25] * 4]

    def test_the_input_is_left_alone(self):
        logits = torch.randn(2, 50)
        before = logits.clone()
        probabilities(logits, metadata([0.5, 1.0], top_k=[3, 0], top_p=[1.0, 0.5], min_p=[0.1, 0.0]))
        assert torch.equal(logits, before)


def naive_draw(p: torch.Tensor, u: float) -> int:
    sums = p.double().cumsum(0)
    return int(torch.searchsorted(sums, u * sums[-1], right=True))


class TestDraw:
    @pytest.mark.parametrize("vocab_size", [1, 2, 255, 256, 257, 511, 512, 1000, 50_000])
    def test_it_is_the_token_at_which_the_running_sum_passes_u(self, vocab_size):
        generator = torch.Generator().manual_seed(vocab_size)
        p = torch.rand(40, vocab_size, generator=generator) ** 8
        u = torch.rand(40, dtype=torch.float64, generator=generator)
        assert draw(p, u).tolist() == [naive_draw(p[row], u[row]) for row in range(40)]

    @pytest.mark.parametrize("num_zeros", [0, 1, 256, 300])
    def test_u_at_both_ends_gives_the_first_and_the_last_possible_token(self, num_zeros):
        p = torch.zeros(2, 2 * num_zeros + 600)
        p[:, num_zeros : num_zeros + 600] = torch.rand(600, generator=torch.Generator().manual_seed(0)) + 0.1
        assert draw(p, torch.tensor([0.0, JUST_UNDER_1], dtype=torch.float64)).tolist() == [num_zeros, num_zeros + 599]

    def test_tokens_of_probability_zero_are_never_drawn(self):
        generator = torch.Generator().manual_seed(2)
        p = torch.rand(500, 1500, generator=generator).softmax(-1)
        p[torch.rand(500, 1500, generator=generator) < 0.99] = 0
        u = torch.rand(500, dtype=torch.float64, generator=generator)
        u[:100], u[100:200] = 0.0, JUST_UNDER_1
        # The borders between two tokens, where rounding would show first.
        sums = p.double().cumsum(-1)
        u[200:] = (sums[200:] / sums[200:, -1:]).gather(1, torch.randint(1500, (300, 1), generator=generator))[:, 0]
        u.clamp_(max=JUST_UNDER_1)
        assert (p.sum(-1) > 0).all()
        assert (p.gather(1, draw(p, u)[:, None]) > 0).all()

    @pytest.mark.parametrize("token", [0, 255, 256, 999])
    def test_a_certain_token_is_drawn_for_every_u(self, token):
        p = torch.zeros(100, 1000)
        p[:, token] = 0.3
        u = torch.linspace(0, JUST_UNDER_1, 100, dtype=torch.float64)
        assert set(draw(p, u).tolist()) == {token}

    @pytest.mark.parametrize("tail", [1.5e-12, 100.5e-12, 300.5e-12, 500.5e-12])
    def test_tiny_tails_are_reached_in_double_precision(self, tail):
        p = torch.full((1, 512), 1e-12)
        p[0, 0] = 1.0
        u = torch.tensor([1 - tail], dtype=torch.float64)
        assert draw(p, u).tolist() == [naive_draw(p[0], u[0])]
        assert draw(p, u).item() > 0

    def test_sums_that_round_differently_in_another_order_do_not_lead_past_the_end(self):
        p = torch.full((1, 256), 3e-17)
        p[0, 0], p[0, 200:] = 1.0, 0.0
        token = draw(p, torch.tensor([JUST_UNDER_1], dtype=torch.float64))
        assert p[0, token] > 0

    def test_frequencies_are_the_probabilities(self):
        p = torch.tensor([0.5, 0.0, 0.25, 0.125, 0.1, 0.025])
        count = 20_000
        u = uniform(torch.full((count,), 7), torch.arange(count), Purpose.SAMPLE)
        drawn = draw(p.expand(count, -1), u).bincount(minlength=6)
        assert drawn[1] == 0
        expected = (p * count)[p > 0]
        chi_square = ((drawn[p > 0] - expected) ** 2 / expected).sum()
        assert chi_square < 18.5, "99.9 percent point of chi-square with 4 degrees of freedom"


class TestPenalties:
    @pytest.mark.parametrize("repetition", [1.0, 1.3, 0.7])
    @pytest.mark.parametrize(("presence", "frequency"), [(0.0, 0.0), (1.5, 0.0), (0.0, 0.4), (-1.0, 2.0)])
    def test_a_row_equals_the_naive_formula(self, repetition, presence, frequency):
        generator = torch.Generator().manual_seed(3)
        logits = torch.randn(3, 40, generator=generator)
        prompt, output = [1, 2, 2, 3], [3, 4, 4, 4, 39]
        mask = torch.zeros(40, dtype=torch.bool)
        mask[prompt] = True
        counts = torch.bincount(torch.tensor(output), minlength=40).float()
        expected = logits.double().clone()
        for token in range(40):
            x = expected[1, token].item()
            if token in prompt or token in output:
                x = x / repetition if x > 0 else x * repetition
            x -= frequency * output.count(token)
            x -= presence * (token in output)
            expected[1, token] = x
        got = apply_penalties(logits.clone(), [PenaltyRow(1, mask, counts, repetition, presence, frequency)])
        torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(got[0], logits[0]) and torch.equal(got[2], logits[2])


class TestSampler:
    def test_greedy_rows_are_the_argmax_beside_random_rows(self):
        logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(4))
        tokens = Sampler()(logits.clone(), metadata([0.0, 1.0, 0.0, 0.7], seeds=[1, 2, 3, 4]))
        argmax = logits.argmax(-1)
        assert tokens[0] == argmax[0] and tokens[2] == argmax[2]
        assert torch.equal(Sampler()(logits.clone(), metadata([0.0] * 4)), argmax)

    def test_a_greedy_row_is_not_touched_by_top_p_and_min_p_of_its_own(self):
        logits = torch.randn(2, 100, generator=torch.Generator().manual_seed(4))
        rows = metadata([0.0, 1.0], top_k=[5, 5], top_p=[0.1, 0.9], min_p=[0.5, 0.1])
        assert Sampler()(logits.clone(), rows)[0] == logits[0].argmax()

    def test_a_random_row_is_the_draw_for_its_seed_and_position_whatever_the_company(self):
        logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(5))
        rows = metadata([1.0, 0.5, 1.0], seeds=[11, 12, 13], positions=[7, 8, 9])
        tokens = Sampler()(logits.clone(), rows)
        u = uniform(rows.seeds, rows.positions, Purpose.SAMPLE)
        assert torch.equal(tokens, draw((logits / rows.temperature[:, None]).softmax(-1), u))
        alone = Sampler()(logits[1:2].clone(), metadata([0.5], seeds=[12], positions=[8]))
        assert alone[0] == tokens[1]

    def test_banned_tokens_never_come_not_even_from_greedy_rows(self):
        logits = torch.randn(2, 6, generator=torch.Generator().manual_seed(6))
        banned = logits.argmax(-1).tolist()
        rows = [(0, [banned[0], 5]), (1, [banned[1]])]
        tokens = Sampler()(logits.clone(), metadata([0.0, 0.0], banned_token_ids=rows))
        assert tokens[0] not in (banned[0], 5) and tokens[1] != banned[1]
        many = metadata([1.0] * 500, positions=list(range(500)), banned_token_ids=[(r, [0, 1]) for r in range(500)])
        assert set(Sampler()(logits[:1].repeat(500, 1), many).tolist()) == {2, 3, 4, 5}

    def test_penalties_come_before_the_choice(self):
        logits = torch.tensor([[3.0, 2.9, 0.0]])
        row = PenaltyRow(0, torch.tensor([True, False, False]), torch.zeros(3), 1.2, 0.0, 0.0)
        assert Sampler()(logits.clone(), metadata([0.0], penalties=[row])).tolist() == [1]

    def test_a_hotter_row_spreads_wider(self):
        logits = torch.linspace(0, 5, 50).repeat(2000, 1)
        kinds = [len(set(Sampler()(logits.clone(), metadata([t] * 2000, positions=list(range(2000)))).tolist()))
                 for t in (0.1, 1.0, 10.0)]  # fmt: skip
        assert all(colder < hotter for colder, hotter in pairwise(kinds))
