"""What is asked of an engine that speculates: stories to continue, and a text to copy with one change.

Stories are what the tiny models were trained on, and say what a drafter that knows the language is worth. A copy is
where prompt lookup shines: nearly all of the answer stands in the prompt.

Two runs can only be asked for the same greedy ids where no choice is a close call: prompts are kept whose best logit
leads the second best by more than a margin at every step (`wide_margin_prompts`).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minivllm.llm import LLM

_OPENINGS = (
    "Once upon a time there was a {who} who {what}. One day",
    "There was once a {who} who {what}, and",
    "In a village by the sea lived a {who} who {what}. When winter came",
    "A long time ago a {who} who {what} said to the king",
)
_WHO = ("poor miller", "young princess", "clever fox", "old soldier", "little girl", "fisherman", "tailor", "giant")
_WHAT = ("had three sons", "could not sleep", "went into the forest", "found a golden key")

PARAGRAPH = (
    "The river rises in the hills behind the village. In spring it carries more water than its bed can hold, and the "
    "lower meadows stand under water for a week or two. Old people say that the river was never so high as in the "
    "year when the bridge was built. The bridge has five arches of grey stone, and the middle one is wide enough for "
    "a barge. In summer children jump from the bridge into the river, though a sign forbids it. In autumn the water "
    "is low and clear, and one can count the stones at the bottom of the river from the middle of the bridge."
)
_CHANGES = (("river", "stream"), ("bridge", "wall"), ("village", "town"), ("water", "milk"))


def stories() -> list[str]:
    """128 beginnings of fairy tales."""
    return [opening.format(who=who, what=what) for what in _WHAT for who in _WHO for opening in _OPENINGS]


def copies() -> list[list[dict[str, str]]]:
    """Conversations that ask for `PARAGRAPH` with one word changed."""
    return [
        [
            {
                "role": "user",
                "content": f"Repeat the following text exactly, but write '{new}' instead of '{old}'.\n\n{PARAGRAPH}",
            }
        ]
        for old, new in _CHANGES
    ]


PROMPTS = {"stories": stories, "copies": copies}


@dataclass(frozen=True)
class GreedyAnswer:
    """What the plain engine says to a prompt."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    margin: float
    """By how much the best logit leads the second best, at the closest of all steps."""


def greedy_answers(llm: "LLM", prompts: list[Any], num_tokens: int) -> list[GreedyAnswer]:
    """Greedy outputs of `num_tokens` tokens, EOS ignored, with their margins, in the order of the prompts.

    Margins are read from a second pass over prompt and output, in which all rows are computed at once. Log-softmax
    shifts all logits of a row alike, so differences of log-probabilities are differences of logits.

    Args:
        llm: without speculation; its max_model_len must hold the longest prompt, num_tokens and one more.
        prompts: texts, token ids, or conversations.
    """
    from minivllm.sampling_params import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    is_chat = isinstance(prompts[0], list) and isinstance(prompts[0][0], dict)
    outputs = (llm.chat if is_chat else llm.generate)(prompts, params, use_tqdm=False)
    texts = [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]
    read = llm.generate(texts, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2), use_tqdm=False)
    answers = []
    for output, again in zip(outputs, read, strict=True):
        rows = again.prompt_logprobs[len(output.prompt_token_ids) :]
        best_two = [sorted((entry.logprob for entry in row.values()), reverse=True)[:2] for row in rows]
        margin = min(best - second for best, second in best_two)
        answers.append(GreedyAnswer(output.prompt_token_ids, output.outputs[0].token_ids, margin))
    return answers


def wide_margin_prompts(
    llm: "LLM", prompts: list[Any], num_tokens: int, least: float, count: int | None = None
) -> list[GreedyAnswer]:
    """The answers without a close call, the first `count` of them; raises ValueError where there are too few."""
    wide = [answer for answer in greedy_answers(llm, prompts, num_tokens) if answer.margin > least]
    if not wide or (count is not None and len(wide) < count):
        raise ValueError(
            f"only {len(wide)} of {len(prompts)} prompts have no close call within {num_tokens} tokens "
            f"(margins above {least}): ask for fewer prompts or fewer tokens"
        )
    return wide[:count]
