"""The token's way back: how the stages of a pipeline that do not sample learn what was sampled.

Only the last stage samples. The first must embed that token in the next step, and all of them lay out their inputs by
the tokens they know; so the scheduler, which books every result, sends the stages what they lack:

    all_token_ids   |--- sent to the stages before ---|--- new_token_ids ---|
                    0                               sent              num_tokens

The promise: once a stage has applied a message, its token ids and num_computed_tokens of every request in the message
are the scheduler's at the moment when the message was made. The last stage has its own samples and reads none of this;
with a single stage nothing is sent.

The *classic rule* (vLLM V1) sends the tokens that the step computes, drafts left out, and lets the stage work out from
num_computed_tokens how many of them are news. That loses accepted drafts: they were computed in an earlier step, as
drafts, and no later step computes them again. It stands here to be looked at; engines use the exact rule.
"""

from collections.abc import Sequence

from minivllm.engine.messages import SchedulerOutput
from minivllm.engine.request import Request

EXACT, CLASSIC = STAGE_RULES = ("exact", "classic")


def new_token_ids_for(all_token_ids: Sequence[int], num_sent: int) -> list[int]:
    """Exact rule, scheduler's side: everything that has not been sent to the stages yet."""
    return list(all_token_ids[num_sent:])


def exact_rule(num_known: int, num_computed: int, new_token_ids: Sequence[int]) -> list[int]:
    """Exact rule, stage's side: what to append to its own token ids is all that came."""
    return list(new_token_ids)


def classic_new_token_ids_for(
    all_token_ids: Sequence[int], num_computed: int, num_scheduled: int, num_drafts: int
) -> list[int]:
    """Classic rule, scheduler's side: the tokens that the step computes, without its drafts."""
    return list(all_token_ids[num_computed : num_computed + num_scheduled - num_drafts])


def classic_rule(num_known: int, num_computed: int, new_token_ids: Sequence[int]) -> list[int]:
    """Classic rule, stage's side: `num_new` tokens are news, the last ones of those that came, as far as they go.

    Args:
        num_known: prompt and output tokens that the stage has.
        num_computed: num_computed_tokens of the request in the message.
    """
    num_new = num_computed + len(new_token_ids) - num_known
    if num_new <= 0:
        return []
    return list(new_token_ids[-num_new:])


RULES = {EXACT: exact_rule, CLASSIC: classic_rule}


class StageStates:
    """The scheduler's knowledge of what the stages know: how many tokens of each request have been sent.

    Args:
        rule: "exact", or "classic" to see what it loses.
    """

    def __init__(self, rule: str = EXACT) -> None:
        if rule not in STAGE_RULES:
            raise ValueError(f"rule must be one of {', '.join(STAGE_RULES)}, not {rule!r}")
        self.rule = rule
        self._num_sent: dict[str, int] = {}

    def enter(self, message: SchedulerOutput, requests: dict[str, Request]) -> None:
        """Complete a finished plan with the tokens that the stages lack; nothing may be withdrawn from it afterwards.

        Args:
            requests: by id, as they were when the message was made.
        """
        for req_id in message.finished_req_ids:
            self._num_sent.pop(req_id, None)
        for new in message.scheduled_new_reqs:
            self._num_sent[new.req_id] = len(new.prompt_token_ids)
        cached = message.scheduled_cached_reqs
        for req_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            request = requests[req_id]
            if self.rule == CLASSIC:
                num_drafts = len(message.scheduled_spec_decode_tokens.get(req_id, ()))
                num_scheduled = message.num_scheduled_tokens[req_id]
                new_token_ids = classic_new_token_ids_for(
                    request.all_token_ids, num_computed, num_scheduled, num_drafts
                )
            else:
                new_token_ids = new_token_ids_for(request.all_token_ids, self._num_sent[req_id])
            cached.new_token_ids.append(new_token_ids)
            self._num_sent[req_id] = request.num_tokens
