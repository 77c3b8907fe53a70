"""Incremental detokenization, chat templates and the loading of tokenizers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from minivllm.checkpoints import CheckpointError
from minivllm.tokenizer import IncrementalDetokenizer, encode_chat, load_tokenizer

CORPUS = ["the quick brown fox, the lazy dog", "日本語のテキスト 日本語", "🙂🙂👩‍🚀 naïve café"]
TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}<s>assistant{{ '\n' }}"


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE with few merges, so that most characters outside ASCII take several tokens."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """Words with a marker in place of the space before them, which decoding drops at the start of a text."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    core.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=core)


BYTE_LEVEL, METASPACE = byte_level_tokenizer(), metaspace_tokenizer()
TEXT = st.text(
    st.one_of(
        st.sampled_from("the fox, 日本語テキスト🙂👩🚀\u200d\u0301é\ufffd\n"), st.characters(exclude_categories=["Cs"])
    ),
    max_size=30,
)


def pieces(detokenizer: IncrementalDetokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.append(token_id) for token_id in ids), detokenizer.flush()]


@settings(max_examples=200, deadline=None)
@given(prompt=TEXT, text=TEXT)
def test_pieces_join_to_the_text_whatever_its_script(prompt, text):
    ids = BYTE_LEVEL.encode(text)
    assert "".join(pieces(IncrementalDetokenizer(BYTE_LEVEL, BYTE_LEVEL.encode(prompt)), ids)) == text


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, len(BYTE_LEVEL) - 1), max_size=40), skip=st.booleans())
def test_pieces_of_arbitrary_tokens_join_to_what_decoding_all_gives(ids, skip):
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, BYTE_LEVEL.encode("the fox"), skip_special_tokens=skip)
    assert "".join(pieces(detokenizer, ids)) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@settings(max_examples=100, deadline=None)
@given(words=st.lists(st.sampled_from(["the", "quick", "brown", "fox", "lazy"]), min_size=2), cut=st.integers(1, 9))
def test_a_space_that_decoding_drops_at_the_start_is_kept_after_a_prompt(words, cut):
    ids = METASPACE.encode(" ".join(words))
    cut = min(cut, len(ids) - 1)
    text = "".join(pieces(IncrementalDetokenizer(METASPACE, ids[:cut]), ids[cut:]))
    assert METASPACE.decode(ids[:cut]) + text == " ".join(words)


def test_nothing_is_given_out_within_a_character():
    ids = BYTE_LEVEL.encode("🦀")
    assert len(ids) > 2
    given_out = pieces(IncrementalDetokenizer(BYTE_LEVEL, []), ids)
    assert given_out == [""] * (len(ids) - 1) + ["🦀", ""]


def test_a_character_that_is_never_completed_comes_out_at_the_end():
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, [])
    assert [detokenizer.append(token_id) for token_id in BYTE_LEVEL.encode("a🦀")[:2]] == ["a", ""]
    assert detokenizer.flush() == "\ufffd"


def test_a_character_begun_by_the_prompt_is_given_out_whole():
    ids = BYTE_LEVEL.encode("ab🦀c")
    cut = len(BYTE_LEVEL.encode("ab")) + 1
    assert "".join(pieces(IncrementalDetokenizer(BYTE_LEVEL, ids[:cut]), ids[cut:])) == "🦀c"


def test_a_token_id_beyond_the_tokenizer_adds_no_text():
    ids = [*BYTE_LEVEL.encode("fox"), 100_000, *BYTE_LEVEL.encode(" dog")]
    assert "".join(pieces(IncrementalDetokenizer(BYTE_LEVEL, []), ids)) == "fox dog"


def test_special_tokens_are_skipped_or_shown():
    ids = [*BYTE_LEVEL.encode("fox"), BYTE_LEVEL.eos_token_id]
    assert "".join(pieces(IncrementalDetokenizer(BYTE_LEVEL, []), ids)) == "fox"
    assert "".join(pieces(IncrementalDetokenizer(BYTE_LEVEL, [], skip_special_tokens=False), ids)) == "fox</s>"


def test_a_chat_becomes_ids_with_each_special_token_as_one_id():
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = TEMPLATE
    ids = encode_chat(tokenizer, [{"role": "user", "content": "the fox"}])
    assert tokenizer.decode(ids) == "<s>user\nthe fox</s>\n<s>assistant\n"
    assert ids.count(tokenizer.bos_token_id) == 2 and ids.count(tokenizer.eos_token_id) == 1


def test_chatting_without_a_template_says_so():
    with pytest.raises(ValueError, match="no chat template"):
        encode_chat(byte_level_tokenizer(), [{"role": "user", "content": "hi"}])


def test_messages_that_the_template_refuses_are_a_value_error():
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="roles must alternate"):
        encode_chat(tokenizer, [{"role": "user", "content": "hi"}])


def test_a_saved_tokenizer_loads_from_its_directory(tmp_path):
    BYTE_LEVEL.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode("the quick 🙂") == BYTE_LEVEL.encode("the quick 🙂")


def test_a_directory_without_tokenizer_says_what_to_do(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(CheckpointError, match="skip_tokenizer_init"):
        load_tokenizer(tmp_path)
