"""Text into ids and rows: tokenizer, packing, the held-out split, and what is refused."""

import pytest
import torch
from tiny_training import tale
from transformers import AutoTokenizer

from minivllm.checkpoints import CheckpointError
from minivllm.checkpoints.training.data import Batches, Stream, encode, read_documents, split_documents
from minivllm.checkpoints.training.tokenizer import (
    BOS_ID,
    EOS_ID,
    read_tokenizer,
    save_tokenizer,
    token_bytes,
    train_tokenizer,
)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(tale().splitlines(keepends=True), 300)


def counting(length: int, sequence_length: int) -> Stream:
    """Ids are their own places in the stream, from 10 on."""
    return Stream(torch.arange(10, 10 + length), sequence_length)


@pytest.mark.parametrize("text", ["Once a king met a fox.\n", "  two  spaces", "Ünïcödé, 2026 🦊\t\n\nend", ""])
def test_the_saved_tokenizer_gives_every_text_back(tokenizer, tmp_path, text):
    save_tokenizer(tokenizer, tmp_path, 64)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    ids = loaded.encode(text)
    assert ids[0] == BOS_ID == loaded.bos_token_id
    assert loaded.decode(ids, skip_special_tokens=True) == text
    assert loaded.decode(ids[1:]) == text
    assert (loaded.eos_token_id, loaded.pad_token_id, len(loaded)) == (EOS_ID, 2, 300)
    assert read_tokenizer(tmp_path).encode(text).ids == ids


def test_special_tokens_in_a_text_are_special(tokenizer, tmp_path):
    save_tokenizer(tokenizer, tmp_path, 64)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.encode("a<|eos|>", add_special_tokens=False)[-1] == EOS_ID


def test_bytes_of_tokens_add_up_to_the_text(tokenizer):
    text = "Once a king met a fox, né 🦊."
    assert sum(token_bytes(tokenizer)[index] for index in tokenizer.encode(text).ids) == len(text.encode())


def test_a_text_too_poor_for_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match=r"vocabulary of \d+ entries, fewer than 4096"):
        train_tokenizer(["abcabc"], 4096)


def test_another_tokenizer_is_refused(tokenizer, tmp_path):
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        read_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str().replace("<|pad|>", "<|other|>"))
    with pytest.raises(CheckpointError, match="another tokenizer"):
        read_tokenizer(tmp_path)


def test_documents_end_with_eos_and_join_to_the_text(tokenizer, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Once a king.\nHe met a fox.\n\n\nOnce a wolf.\n")
    documents = read_documents(path)
    assert documents == ["Once a king.\nHe met a fox.", "Once a wolf.\n"]
    ids = encode(documents, tokenizer, torch.device("cpu")).tolist()
    assert ids.count(EOS_ID) == 2 and ids[-1] == EOS_ID and BOS_ID not in ids
    assert tokenizer.decode(ids) == "".join(documents)


def test_a_missing_and_an_empty_text_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"no text file .*nowhere\.txt"):
        read_documents(tmp_path / "nowhere.txt")
    (tmp_path / "empty.txt").write_text(" \n\n ")
    with pytest.raises(ValueError, match=r"empty\.txt is empty"):
        read_documents(tmp_path / "empty.txt")


def test_the_last_twentieth_is_held_out_and_nothing_is_lost():
    documents = [tale(30), tale(70)]
    train, held_out = split_documents(documents)
    assert "".join(train + held_out) == "".join(documents)
    assert 0.05 <= len("".join(held_out)) / len("".join(documents)) < 0.07
    with pytest.raises(ValueError, match="one line only"):
        split_documents(["all in one line"])


def test_a_row_begins_with_bos_and_holds_one_token_more_than_targets():
    stream = counting(40, sequence_length=4)
    assert stream.rows(torch.tensor([0, 7])).tolist() == [[BOS_ID, 10, 11, 12, 13, 14], [BOS_ID, 17, 18, 19, 20, 21]]


def test_every_epoch_has_other_cuts_in_another_order_and_repeats_for_the_same_seed():
    stream = counting(200, sequence_length=8)
    first, second = stream.epoch_starts(seed=1, epoch=0), stream.epoch_starts(seed=1, epoch=1)
    assert torch.equal(first, stream.epoch_starts(seed=1, epoch=0))
    assert set(first.tolist()).isdisjoint(second.tolist())
    for starts in (first, second):
        assert (starts.sort().values.diff() == 8).all() and len(starts) == stream.rows_per_epoch
        assert stream.rows(starts).max() < 210
    assert not torch.equal(first.sort().values, first)


def test_held_out_rows_predict_each_token_once():
    stream = counting(41, sequence_length=8)
    targets = stream.rows(stream.held_out_starts())[:, 1:-1].flatten().tolist()
    assert targets == list(range(10, 50))


def test_a_steps_batch_does_not_depend_on_the_steps_before_it():
    stream = counting(500, sequence_length=8)
    in_order = Batches(stream, batch_size=4, seed=0)
    rows = [in_order.batch(step) for step in range(40)]
    assert in_order.steps_per_epoch < 20
    assert torch.equal(Batches(stream, batch_size=4, seed=0).batch(37), rows[37])


def test_too_little_text_for_a_row_or_a_batch_is_refused():
    with pytest.raises(ValueError, match=r"has 12 tokens.*--sequence-length"):
        counting(12, sequence_length=8)
    with pytest.raises(ValueError, match=r"gives 3 rows.*batch of 4"):
        Batches(counting(40, sequence_length=8), batch_size=4, seed=0)
