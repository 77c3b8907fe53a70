"""A scheduler's message in a few lines, for those who want to read what crosses between scheduler and stages."""

from minivllm.engine.messages import SchedulerOutput


def message_lines(message: SchedulerOutput) -> list[str]:
    """One line for the step, one for each request in it, one for those that ended or lost their blocks."""
    total = message.total_num_scheduled_tokens
    lines = [f"step {message.step}: {total} token{'s' * (total != 1)}"]
    for new in message.scheduled_new_reqs:
        lines.append(
            f"  {new.req_id}: new, prompt of {len(new.prompt_token_ids)}, computed {new.num_computed_tokens}, "
            f"+{message.num_scheduled_tokens[new.req_id]}, blocks {new.block_ids}"
        )
    cached = message.scheduled_cached_reqs
    for index, req_id in enumerate(cached.req_ids):
        parts = [f"  {req_id}: computed {cached.num_computed_tokens[index]}, +{message.num_scheduled_tokens[req_id]}"]
        if req_id in cached.resumed_req_ids:
            parts.append("resumed")
        if cached.new_block_ids[index]:
            parts.append(f"blocks {cached.new_block_ids[index]}")
        if cached.new_token_ids:
            parts.append(f"new_token_ids {cached.new_token_ids[index]}")
        if req_id in message.scheduled_spec_decode_tokens:
            parts.append(f"drafts {message.scheduled_spec_decode_tokens[req_id]}")
        lines.append(", ".join(parts))
    for what, req_ids in (("finished", message.finished_req_ids), ("preempted", message.preempted_req_ids)):
        if req_ids:
            lines.append(f"  {what}: {', '.join(sorted(req_ids))}")
    return lines
