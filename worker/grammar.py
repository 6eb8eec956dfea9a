"""Grammars of the batch's rows: what each may say next, as bits over the vocabulary.

A row's matcher is made when the row joins, from its spec and the output that it already has, off the step's thread;
then each sampled token advances it, and the bits for the next one are computed by other threads, which do not need the
interpreter, while the device works. A row whose grammar failed allows nothing.
"""

from __future__ import annotations

import os
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier, Lock

import llguidance
import numpy as np
from numpy.typing import NDArray

from proto.messages import GrammarFailed, GrammarReady, Int32, Join, int64
from worker.grammar_source import LIMITS, GrammarError, library_grammar, one_line

MAX_CACHED = 64  # compiled grammars that are kept
COMPILERS = 4  # threads, so that a grammar that takes long does not hold up the others
MASKERS = max(1, min(8, len(os.sched_getaffinity(0)) // 4))  # threads that compute the bits of many rows

Report = GrammarReady | GrammarFailed


class GrammarCompiler:
    """Makes matchers for one vocabulary; keeps the last grammars that were asked for. Safe for several threads.

    The vocabulary is read when the first grammar comes: it takes a good part of a second, in which Python stands
    still, and a worker that never sees a grammar need not pay for it.
    """

    def __init__(self, tokenizer_file: Path, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.num_words = -(-vocab_size // 32)
        self._file = tokenizer_file
        self._lock = Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._executor: llguidance.LLExecutor | None = None  # its calls give up the interpreter's lock
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()

    @property
    def own_ends(self) -> Sequence[int]:
        """Ids that the library takes for the end of text, whatever a request says."""
        return self._read_vocabulary().eos_tokens

    def matcher(self, spec: str) -> llguidance.LLMatcher:
        """A matcher at the grammar's beginning. GrammarError when the grammar cannot be compiled."""
        with self._lock:
            vocabulary = self._read_vocabulary()
            known = self._compiled.get(spec)
            if known is not None:
                self._compiled.move_to_end(spec)
        if known is None:
            known = llguidance.LLMatcher(vocabulary, library_grammar(spec), log_level=0, limits=LIMITS)
            if known.is_error():
                raise GrammarError(one_line(known.get_error()))
            with self._lock:
                self._compiled[spec] = known
                while len(self._compiled) > MAX_CACHED:
                    self._compiled.popitem(last=False)
        return known.deep_copy()

    def advance(self, matchers: Sequence[tuple[llguidance.LLMatcher, int]]) -> Int32:
        """Has each matcher follow a token; what each allows after it, [matchers, num_words]. One that fails says so."""
        if self._executor is None:
            self._executor = llguidance.LLExecutor(MASKERS)
        bits = np.zeros((len(matchers), self.num_words), np.int32)
        self._executor.consume_token_par(list(matchers))
        lines = [(matcher, line) for line, (matcher, _) in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(lines, bits.ctypes.data, bits[0].nbytes, len(bits))
        return bits

    def _read_vocabulary(self) -> llguidance.LLTokenizer:
        if self._vocabulary is None:
            slices = llguidance.LLTokenizer.json_slices()
            self._vocabulary = llguidance.LLTokenizer(str(self._file), n_vocab=self.vocab_size, slices=slices)
        return self._vocabulary


class Bits:
    """Some ids as bits of the words that they are in."""

    def __init__(self, ids: Sequence[int]) -> None:
        words = np.asarray(ids, np.int64) // 32
        self.words = np.unique(words)
        self.masks = np.zeros(len(self.words), np.uint32)
        places = np.searchsorted(self.words, words)
        np.bitwise_or.at(self.masks, places, np.uint32(1) << np.asarray(ids, np.uint32) % np.uint32(32))

    def set(self, words: NDArray[np.uint32]) -> None:
        """In all the vocabulary's words, in place."""
        words[self.words] |= self.masks

    def clear(self, words: NDArray[np.uint32]) -> None:
        """In all the vocabulary's words, in place."""
        words[self.words] &= ~self.masks


class RowGrammar:
    """One row's grammar. After `begin`, only one thread at a time calls it.

    bits: which ids the next token may have; bit i % 32 of word i // 32.
    """

    def __init__(self, join: Join, num_words: int) -> None:
        self.sequence = join.sequence
        self.spec = join.params.grammar
        self.bits = np.zeros(num_words, np.int32)
        self.failed = False
        self.compiled: Future[None] = Future()
        self.matcher: llguidance.LLMatcher
        self._end_ids = join.params.eos_ids
        self._ends = Bits(self._end_ids)
        self._all_ends: Bits  # with those that the library takes for ends
        self._output: list[int] = join.tokens[join.num_prompt :].tolist()

    def begin(self, compiler: GrammarCompiler) -> None:
        """Compile, follow the output so far, and compute the first bits. GrammarError when that fails."""
        self.matcher = compiler.matcher(self.spec)
        self._all_ends = Bits((*compiler.own_ends, *self._end_ids))
        if self._output and not self.matcher.consume_tokens(self._output):
            raise GrammarError(f"the output so far does not match: {one_line(self.matcher.get_error())}")
        bits = np.zeros_like(self.bits)
        self.matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        self.take(bits)

    def take(self, bits: Int32) -> None:
        """`bits` are what the matcher allows next; the request's own end ids are allowed where the grammar may end, and
        nowhere else. GrammarError when the matcher has failed."""
        if self.matcher.is_error():
            raise GrammarError(one_line(self.matcher.get_error()))
        words = bits.view(np.uint32)
        self._all_ends.clear(words)
        if self.matcher.is_accepting():
            self._ends.set(words)
        self.bits = bits


def _all_threads(count: int) -> ThreadPoolExecutor:
    """A pool that has its threads at once, so that what a worker holds does not depend on how grammars overlapped."""
    pool, all_there = ThreadPoolExecutor(count, thread_name_prefix="grammar"), Barrier(count)
    for _ in range(count):
        pool.submit(all_there.wait)
    return pool


class GrammarRows:
    """The rows of one batch that have a grammar. All methods are called by the thread that runs the steps.

    `wake` is called, on any thread, when `reports` has something new.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self.rows: dict[int, RowGrammar] = {}
        self._begun: dict[int, RowGrammar] = {}  # of sequences whose rows are still to begin
        self.wake: Callable[[], None] = lambda: None
        self._compiler = compiler
        self._reports: deque[Report] = deque()
        self._compiling: ThreadPoolExecutor | None = None
        self._nothing = np.zeros(compiler.num_words, np.int32)
        self._advancing = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._masks: Future[None] | None = None
        self._taken: list[tuple[RowGrammar, int]] = []  # sampled tokens that no mask was computed for yet

    def begin(self, join: Join) -> None:
        """A row will begin; its grammar, if it has one, is compiled in the background."""
        if join.params.grammar:
            grammar = self._begun[join.sequence] = RowGrammar(join, self._compiler.num_words)
            self._compiling = self._compiling or _all_threads(COMPILERS)
            grammar.compiled = self._compiling.submit(self._begin, grammar, self._reports)

    def join(self, join: Join) -> None:
        """A row begins, of which `begin` need not have been told."""
        self.rows.pop(join.row, None)
        if join.params.grammar:
            if join.sequence not in self._begun:
                self.begin(join)
            self.rows[join.row] = self._begun.pop(join.sequence)

    def drop(self, row: int) -> None:
        """The row has stopped or left."""
        if self.rows:
            self.rows.pop(row, None)

    def bits(self, row: int) -> Int32 | None:
        """Which ids the row may sample next, or None for all. Waits for what is still being computed."""
        grammar = self.rows.get(row)
        if grammar is None:
            return None
        if not grammar.failed:
            grammar.compiled.result()
        self.start()
        if self._masks is not None:
            self._masks.result()
        return grammar.bits

    def advance(self, rows: Int32, tokens: Int32) -> None:
        """These rows have sampled these tokens. Rows that stopped by them were dropped before."""
        if not self.rows:
            return
        pairs = zip(rows.tolist(), tokens.tolist(), strict=True)
        self._taken += [(self.rows[row], token) for row, token in pairs if row in self.rows]

    def start(self) -> None:
        """Have what the rows may say next computed, on other threads: best as soon as this one has nothing to do."""
        if self._taken:
            self._masks = self._advancing.submit(self._advance, self._taken, self._reports)
            self._taken = []

    def fail(self, sequence: int, why: str) -> None:
        """Give up the grammar of this sequence, if it has not begun; what its compilation still brings is dropped."""
        for grammar in (*self.rows.values(), *self._begun.values()):
            if grammar.sequence == sequence and not grammar.failed:
                grammar.failed = True
                self._tell(self._reports, GrammarFailed(sequence=sequence, message=f"the grammar failed: {why}"))

    def reset(self) -> None:
        """The batch is empty; reports on what it held are dropped."""
        self.rows.clear()
        self._begun.clear()
        self._taken = []
        self._reports = deque()

    def reports(self) -> list[Report]:
        """What there is to tell the scheduler, oldest first."""
        reports, taken = self._reports, []
        while reports:
            taken.append(reports.popleft())
        return taken

    def settle(self) -> None:
        """Wait until nothing is being compiled or computed."""
        for grammar in self.rows.values():
            if not grammar.failed:
                grammar.compiled.result()
        self.start()
        if self._masks is not None:
            self._masks.result()

    # --- on other threads -----------------------------------------------------------------------------------------

    def _begin(self, grammar: RowGrammar, reports: deque[Report]) -> None:
        if grammar.failed:  # given up while it waited for a thread
            return
        if self._guarded(grammar, reports, partial(grammar.begin, self._compiler)) and not grammar.failed:
            self._tell(reports, GrammarReady(sequences=int64([grammar.sequence])))

    def _advance(self, taken: list[tuple[RowGrammar, int]], reports: deque[Report]) -> None:
        taken = [(grammar, token) for grammar, token in taken if not grammar.failed]
        for grammar, _ in taken:
            grammar.bits = self._nothing
        allowed = self._compiler.advance([(grammar.matcher, token) for grammar, token in taken]) if taken else ()
        for (grammar, _), bits in zip(taken, allowed, strict=True):
            self._guarded(grammar, reports, partial(grammar.take, bits))

    def _guarded(self, grammar: RowGrammar, reports: deque[Report], work: Callable[[], None]) -> bool:
        """Whether it went well; whatever went wrong is that row's alone, and told."""
        try:
            work()
        except Exception as error:
            if grammar.failed:  # given up before, and told
                return False
            grammar.failed = True
            text = str(error) if isinstance(error, GrammarError) else f"{type(error).__name__}: {error}"
            message = f"the grammar failed: {one_line(text)}"
            self._tell(reports, GrammarFailed(sequence=grammar.sequence, message=message))
            return False
        return True

    def _tell(self, reports: deque[Report], report: Report) -> None:
        reports.append(report)
        self.wake()


class NoGrammars(GrammarRows):
    """For a batch whose grammars are another's affair."""

    def __init__(self) -> None:
        self.rows = {}
        self._taken = []

    def join(self, join: Join) -> None:
        """Nothing is compiled."""

    def bits(self, row: int) -> Int32 | None:
        """All ids."""
        return None

    def reset(self) -> None:
        """Nothing was kept."""
