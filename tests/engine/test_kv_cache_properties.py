"""Random histories of the block pool, beside a model of it that is too simple to be wrong."""

from helpers import make_request
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from minivllm.engine.kv_cache import KVCacheManager
from minivllm.engine.request import Request

BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN = 2, 7, 12


class KVCacheHistory(RuleBasedStateMachine):
    """Requests with prompts over two letters, so that prefixes meet often, in a pool that is often full.

    The model: `contents` maps a block to the tokens that its slots were last written with (all tokens from the
    beginning on, as K and V depend on them).
    """

    def __init__(self):
        super().__init__()
        self.kv = KVCacheManager(NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN)
        self.live: list[Request] = []
        self.contents: dict[int, tuple[int, ...]] = {}
        self.count = 0

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=10), share=st.floats(0.1, 1.0))
    def admit(self, prompt, share):
        self.count += 1
        request = make_request(f"r{self.count}", prompt, max_tokens=100)
        hits = self.kv.find_computed_blocks(request)
        num_computed = len(hits) * BLOCK_SIZE
        assert num_computed < len(prompt)
        for index, block in enumerate(hits):
            assert self.contents[block.block_id] == tuple(prompt[: (index + 1) * BLOCK_SIZE])
        num_new = max(1, int((len(prompt) - num_computed) * share))
        if self.allocate(request, num_new, hits):
            self.live.append(request)
            request.num_computed_tokens = num_computed + num_new

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 20), token=st.integers(0, 1))
    def continue_one(self, which, token):
        request = self.live[which % len(self.live)]
        if request.num_computed_tokens == request.num_tokens and request.num_tokens < MAX_MODEL_LEN:
            request.append_output_token(token, MAX_MODEL_LEN + 1)
        num_new = request.num_tokens - request.num_computed_tokens
        if num_new and self.allocate(request, num_new, []):
            request.num_computed_tokens += num_new

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 20))
    def free_one(self, which):
        request = self.live.pop(which % len(self.live))
        before = self.kv.block_pool.num_free_blocks
        alone = [b for b in self.kv.block_ids(request) if self.kv.block_pool.blocks[b].ref_count == 1]
        self.kv.free(request)
        assert self.kv.block_pool.num_free_blocks == before + len(alone)

    def allocate(self, request, num_new, hits) -> bool:
        end = request.num_computed_tokens + len(hits) * BLOCK_SIZE + num_new
        needed = -(-end // BLOCK_SIZE) - len(hits) - len(self.kv.block_ids(request))
        free_before = self.kv.block_pool.num_free_blocks
        idle = sum(block.ref_count == 0 for block in hits)
        added = self.kv.allocate(request, num_new, hits)
        assert (added is None) == (needed + idle > free_before)
        if added is None:
            assert self.kv.block_pool.num_free_blocks == free_before
            return False
        assert len(added) == needed + len(hits)
        for index, block_id in enumerate(self.kv.block_ids(request)):
            if (index + 1) * BLOCK_SIZE > end - num_new:  # the step writes into this block
                self.contents[block_id] = tuple(request.all_token_ids[: min((index + 1) * BLOCK_SIZE, end)])
        return True

    @invariant()
    def ownership_is_consistent(self):
        self.kv.check_invariants()

    @invariant()
    def every_request_reads_its_own_tokens(self):
        for request in self.live:
            table = self.kv.block_ids(request)
            for index in range(request.num_computed_tokens // BLOCK_SIZE):
                assert self.contents[table[index]] == tuple(request.all_token_ids[: (index + 1) * BLOCK_SIZE])

    def teardown(self):
        for request in self.live:
            self.kv.free(request)
        self.kv.check_invariants()
        assert self.kv.usage == 0.0


TestKVCacheHistories = KVCacheHistory.TestCase
TestKVCacheHistories.settings = settings(stateful_step_count=40)
