"""The prefix cache: content keys against a hash of everything before, the allocator against lists that are searched."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sparda_jax.cache.prefix import KeyChain, PrefixBlocks, regime
from sparda_jax.config import SparseConfig

SPARSE = SparseConfig(window_size=64, topk=2, dense_len=300)  # 3 blocks selected: tokens from 192 on can tell


def keys_of(tokens: np.ndarray, sparse_from: int | None = None, salt: bytes = b"model, mode") -> list[bytes]:
    """The keys of tokens that select from position ``sparse_from`` on; None: they all read everything."""
    chain = KeyChain(salt=salt, sparse=SPARSE)
    dense = len(tokens) if sparse_from is None else sparse_from
    chain.extend(tokens[:dense], False)
    chain.extend(tokens[dense:].tolist(), True)
    return chain.keys


def test_only_blocks_beyond_a_selection_tell_dense_from_sparse() -> None:
    assert [regime(block, False, SPARSE) for block in range(5)] == [0, 0, 0, 1, 1]
    assert [regime(block, True, SPARSE) for block in range(5)] == [0, 0, 0, 2, 2]
    tokens = np.random.default_rng(0).integers(0, 2**31, 6 * 64 + 5)
    dense, sparse, crossing = keys_of(tokens), keys_of(tokens, 0), keys_of(tokens, 299)
    assert len(dense) == len(sparse) == len(crossing) == 6, "the last 5 tokens fill no block"
    assert dense[:3] == sparse[:3]
    assert not set(dense[3:]) & set(sparse[3:])
    assert crossing[:4] == dense[:4]
    assert not set(crossing[4:]) & {*dense, *sparse}, "tokens 256 to 298 read all, the others of the block select"
    assert keys_of(tokens, 256)[4] != crossing[4], "one token's regime is enough"
    assert keys_of(tokens, 192) == sparse, "before that the choice makes no difference"


def test_a_key_is_the_hash_of_the_key_before_the_regimes_and_the_tokens() -> None:
    tokens = np.random.default_rng(1).integers(0, 2**31, 4 * 64)
    key = hashlib.blake2b(b"model, mode", digest_size=16).digest()
    for block, regimes in enumerate([b"\0" * 64, b"\0" * 64, b"\0" * 64, b"\1" * 10 + b"\2" * 54]):
        content = b"".join(int(token).to_bytes(4, "little") for token in tokens[64 * block : 64 * block + 64])
        key = hashlib.blake2b(key + regimes + content, digest_size=16).digest()
        assert keys_of(tokens, 202)[block] == key


@given(st.integers(0, 319), st.integers(0, 2**31 - 1))
def test_keys_agree_up_to_the_first_difference(place: int, token: int) -> None:
    tokens = np.random.default_rng(2).integers(0, 2**31, 320)
    changed = tokens.copy()
    changed[place] = token if token != tokens[place] else token - 1
    same = [a == b for a, b in zip(keys_of(tokens), keys_of(changed), strict=True)]
    assert same == [block < place // 64 for block in range(5)]
    assert not set(keys_of(tokens)) & set(keys_of(tokens, salt=b"another model"))


@given(st.lists(st.integers(0, 130), max_size=8))
def test_keys_do_not_depend_on_how_the_tokens_come(sizes: list[int]) -> None:
    tokens = np.random.default_rng(3).integers(0, 2**31, sum(sizes))
    chain, start = KeyChain(salt=b"model, mode", sparse=SPARSE), 0
    for size in sizes:
        chain.extend(tokens[start : start + size], False)
        start += size
        assert chain.keys == keys_of(tokens[:start])
    for count in range(1, 66):
        chain.append(7, True)
        assert chain.keys == keys_of(np.concatenate([tokens, np.full(count, 7)]), len(tokens))


def published(blocks: PrefixBlocks, names: str) -> list[int]:
    """A sequence whose blocks have these content keys."""
    taken = blocks.take(len(names))
    for block, name in zip(taken, names, strict=True):
        blocks.publish(block, name.encode())
    return taken


def match(blocks: PrefixBlocks, names: str) -> list[int]:
    return blocks.match([name.encode() for name in names])


def test_a_prefix_is_found_in_use_and_after_it() -> None:
    blocks = PrefixBlocks(8)
    first = published(blocks, "abc")
    assert match(blocks, "abx") == first[:2]
    assert match(blocks, "xbc") == [], "a run starts with the first key"
    blocks.give_back(first)
    assert (blocks.num_free, blocks.num_cached) == (6, 1), "a and b have a user"
    blocks.give_back(first[:2])
    assert (blocks.num_free, blocks.num_cached) == (8, 3)
    assert match(blocks, "abc") == first
    assert (blocks.num_free, blocks.num_cached) == (5, 0)


def test_the_least_recently_used_sequence_makes_room_and_its_tail_first() -> None:
    blocks = PrefixBlocks(6)
    older, newer = published(blocks, "abc"), published(blocks, "de")
    blocks.give_back(older)
    blocks.give_back(newer)
    (unused,) = blocks.take(1)
    assert unused not in older + newer, "a block that holds nothing goes first"
    assert blocks.take(2) == [older[2], older[1]]
    again = match(blocks, "abc")
    assert again == older[:1], "the head is still found"
    blocks.give_back(again)
    assert blocks.take(3) == [newer[1], newer[0], older[0]], "it became the most recent"
    assert match(blocks, "a") == match(blocks, "d") == []


def test_blocks_in_use_never_make_room() -> None:
    blocks = PrefixBlocks(4)
    first = published(blocks, "abc")
    blocks.give_back(first)
    assert match(blocks, "ab") == first[:2]
    with pytest.raises(MemoryError, match="3 blocks asked for, 2 of 4"):
        blocks.take(3)
    assert (blocks.num_free, blocks.num_cached) == (2, 1), "a refused call takes nothing"
    blocks.forget()
    assert (blocks.num_free, blocks.num_cached) == (2, 0)
    assert match(blocks, "abc") == first[:2], "what is in use stays known"


def test_a_block_has_one_key_and_a_user_when_it_gets_it() -> None:
    blocks = PrefixBlocks(2)
    (block,) = published(blocks, "a")
    blocks.publish(block, b"a")
    with pytest.raises(ValueError, match=f"block {block} is published under another key"):
        blocks.publish(block, b"b")
    assert match(blocks, "b") == []
    blocks.give_back([block])
    for unused in (block, 1 - block):
        with pytest.raises(ValueError, match="is not in use"):
            blocks.publish(unused, b"b")


def test_identical_prefixes_that_arrive_together_leave_one_copy() -> None:
    blocks = PrefixBlocks(9)
    first, second = published(blocks, "ab"), published(blocks, "abc")
    other = published(blocks, "de")
    assert match(blocks, "abc") == [*first, second[2]], "the first to be published stays"
    blocks.give_back([*first, second[2]])
    blocks.give_back(first)
    blocks.give_back(other)
    assert match(blocks, "ab") == first
    blocks.give_back(first)
    blocks.give_back(other := match(blocks, "de"))
    blocks.give_back(second)
    assert (blocks.num_free, blocks.num_cached) == (9, 5)
    blocks.take(4)
    assert blocks.take(5) == [*other[::-1], second[2], *first[::-1]], "the kept head is as recent as its twin's tail"


def test_a_twin_takes_the_place_of_a_copy_that_made_room() -> None:
    blocks = PrefixBlocks(4)
    first, second = published(blocks, "a"), published(blocks, "ab")
    blocks.give_back(first)
    blocks.take(2)
    assert match(blocks, "ab") == []
    blocks.give_back(second)
    assert match(blocks, "ab") == second


class Sequences(RuleBasedStateMachine):
    """Sequences of few different contents in a small pool, beside lists that are searched from the start.

    A key is the text up to its block's end, so that the key before it is the same without its last letter.
    """

    SIZE = 7

    def __init__(self) -> None:
        super().__init__()
        self.blocks = PrefixBlocks(self.SIZE)
        self.running: list[tuple[str, list[int], int]] = []  # text, its blocks, how many of them are published
        self.found: list[tuple[str, int]] = []  # what can be found, in the order in which it was published
        self.cached: list[int] = []  # oldest first

    def users(self) -> list[int]:
        return [block for _, blocks, _ in self.running for block in blocks]

    def places(self) -> dict[str, int]:
        return dict(self.found)

    def take(self, count: int) -> list[int] | None:
        empty = set(range(self.SIZE)) - set(self.users()) - set(self.cached)
        if count > len(empty) + len(self.cached):
            with pytest.raises(MemoryError):
                self.blocks.take(count)
            return None
        taken = self.blocks.take(count)
        fresh, evicted = taken[: len(empty)], taken[len(empty) :]
        assert set(fresh) <= empty
        assert len(set(fresh)) == len(fresh)
        assert evicted == self.cached[: len(evicted)]
        self.cached = self.cached[len(evicted) :]
        self.found = [(text, block) for text, block in self.found if block not in evicted]
        return taken

    @rule(text=st.text("ab", min_size=1, max_size=4))
    def arrive(self, text: str) -> None:
        prefixes = [text[: n + 1] for n in range(len(text))]
        expected = []
        while len(expected) < len(text) and prefixes[len(expected)] in self.places():
            expected.append(self.places()[prefixes[len(expected)]])
        matched = self.blocks.match([prefix.encode() for prefix in prefixes])
        assert matched == expected
        self.cached = [block for block in self.cached if block not in matched]
        self.running.append((text[: len(matched)], matched, len(matched)))
        taken = self.take(len(text) - len(matched))
        if taken is None:
            self.end(-1)
        else:
            self.running[-1] = (text, matched + taken, len(matched))

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 9), letter=st.sampled_from("ab"))
    def grow(self, number: int, letter: str) -> None:
        number %= len(self.running)
        taken = self.take(1)
        if taken is not None:
            text, blocks, finished = self.running[number]
            self.running[number] = (text + letter, blocks + taken, finished)

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 9), count=st.integers(1, 4))
    def finish(self, number: int, count: int) -> None:
        number %= len(self.running)
        text, blocks, finished = self.running[number]
        end = min(finished + count, len(text))
        for place in range(finished, end):
            prefix = text[: place + 1]
            self.blocks.publish(blocks[place], prefix.encode())
            if prefix not in self.places():
                self.found.append((prefix, blocks[place]))
        self.running[number] = (text, blocks, end)

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 9))
    def end(self, number: int) -> None:
        text, blocks, finished = self.running.pop(number % len(self.running))
        self.blocks.give_back(blocks)
        for place in reversed(range(finished)):
            if blocks[place] in self.users():
                continue
            prefix = text[: place + 1]
            if prefix not in self.places():
                self.found.append((prefix, blocks[place]))
            kept = self.places()[prefix]
            if kept not in self.users():
                self.cached = [block for block in self.cached if block != kept] + [kept]

    @rule()
    def forget(self) -> None:
        self.blocks.forget()
        self.found = [(text, block) for text, block in self.found if block not in self.cached]
        self.cached = []

    @invariant()
    def every_block_is_used_cached_or_empty(self) -> None:
        used = set(self.users())
        assert not used & set(self.cached)
        assert self.blocks.num_cached == len(self.cached)
        assert self.blocks.num_free + len(used) == self.SIZE

    @invariant()
    def a_tail_is_not_cached_without_its_head(self) -> None:
        text_of = {block: text for text, block in self.found}
        for age, block in enumerate(self.cached):
            head = text_of[block][:-1]
            if head:
                assert self.places()[head] in {*self.users(), *self.cached[age + 1 :]}


TestSequences = Sequences.TestCase
TestSequences.settings = settings(max_examples=200, stateful_step_count=40)
