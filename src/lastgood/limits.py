"""Limits: bounds of sizes, counts and times that several modules rely on, and the arithmetic between them.

Each assertion states what a protocol depends on; a change that breaks one fails at import. A constant that a single
module uses, and that nothing else depends on, is defined in that module. Imports nothing of this package.
"""

from __future__ import annotations

# ---- alignment -------------------------------------------------------------------------------------------------

DIRECT_IO_BYTES = 4096
"""Buffers, offsets and lengths of direct I/O are multiples of it: the largest logical block in common use."""
PAGE_BYTES = 4096
"""The format's alignment: tensor data, chunks, parity cells and files in slots start at multiples of it."""
HUGE_PAGE_BYTES = 2 << 20
"""The arena maps memory in multiples of it, so that the kernel can use huge pages."""
ELEMENT_LIMIT_BYTES = 16
"""The widest element of a tensor (complex128)."""

assert PAGE_BYTES % DIRECT_IO_BYTES == 0, "what the format aligns can be read and written by direct I/O"
assert HUGE_PAGE_BYTES % PAGE_BYTES == 0
assert PAGE_BYTES % ELEMENT_LIMIT_BYTES == 0, "tensor data that starts at a page is aligned to its elements"

# ---- chunks: the unit of copying, digesting, writing and reading -------------------------------------------------

CHUNK_BYTES = 8 << 20
"""The default chunk of a save."""
CHUNK_LIMIT_BYTES = 256 << 20
"""The largest chunk that a manifest may name: a reader holds a few chunks in memory, whatever the manifest says."""
VERIFY_BLOCK_BYTES = 1 << 20
"""The guard passes each block to every layer in turn, so that the block stays in the processor's cache."""
FINITE_BLOCK_BYTES = 1 << 18
"""The search for NaN and infinity makes temporary arrays of this length, which stay in the processor's cache."""

assert CHUNK_BYTES <= CHUNK_LIMIT_BYTES
assert CHUNK_BYTES % PAGE_BYTES == CHUNK_LIMIT_BYTES % PAGE_BYTES == 0, "each chunk starts at a page of its file"
assert VERIFY_BLOCK_BYTES % ELEMENT_LIMIT_BYTES == 0, "no block boundary cuts an element of a tensor"
assert FINITE_BLOCK_BYTES % ELEMENT_LIMIT_BYTES == 0
assert FINITE_BLOCK_BYTES <= VERIFY_BLOCK_BYTES <= CHUNK_BYTES

# ---- records -----------------------------------------------------------------------------------------------------

TINY_BYTES = 64
"""Tensors that are not longer lie together in a file, and one of several holders writes all of them: the scalars of
optimizers, above all. Who wants one reads the whole chunk in which it lies."""
HEADER_LIMIT_BYTES = 100_000_000
"""safetensors readers refuse a longer header. The tensors of a rank whose header would be longer take several files."""
RECORD_LIMIT_BYTES = 64 << 20
"""The longest commit, pointer, mark or label that is read; also the longest table of a slot tier."""
MANIFEST_LIMIT_BYTES = 1 << 30
"""The longest manifest; its length is also in its seal."""
PARITY_RECORD_LIMIT_BYTES = 256 << 20
"""The longest record of a parity file: it holds a digest of every cell."""
DIGEST_LIMIT_CHARACTERS = 64
"""The longest digest in hexadecimal (blake3, sha256); io/checksum.py asserts it."""
STEP_DIGITS = 12
"""Digits of a step in the name of a generation's folder."""
STEP_LIMIT = 10**STEP_DIGITS
"""Steps are below it, so that folder names sort in the order of their steps."""
DIMENSION_LIMIT = 64
"""Neither torch nor numpy has a tensor of more dimensions."""
DEPTH_LIMIT = 100
"""Values are nested no deeper: encoding and decoding call themselves once or twice for each level."""
DTYPE_DEPTH_LIMIT = 16
"""Structures and subarrays of a NumPy dtype are nested no deeper."""

PACK_TAIL_BYTES = 1 << 20
"""The first read of a pack fetches so many bytes at its end, which most often hold its index and all manifests."""
PACK_END_LIMIT_BYTES = 64 << 20
"""The longest end of a pack that is read at once: index and footer, and the manifests before them if they fit."""

assert PACK_TAIL_BYTES <= PACK_END_LIMIT_BYTES
assert RECORD_LIMIT_BYTES < PARITY_RECORD_LIMIT_BYTES < MANIFEST_LIMIT_BYTES
assert 8 * DEPTH_LIMIT < 1000, "eight calls a level stay within Python's default recursion limit"
assert DTYPE_DEPTH_LIMIT <= DEPTH_LIMIT

# ---- saves in flight ---------------------------------------------------------------------------------------------

MAX_IN_FLIGHT = 64
"""The largest number of saves in flight and of writer threads that a user may ask for."""
WORKERS = 3
"""Threads that write or read the bytes of a run, by default."""
READ_LIMIT = 3
"""The largest number of chunks of a file that are read from a disk at once (fewer on few processors: io/files.py)."""
STORE_READS = 6
"""Chunks of a file that are read from an object store at once: one request each, and one connection is slower than most
networks."""
UPKEEP_CHUNKS = 3
"""Chunks of memory in which generations are verified after their commit."""
EXAMINATION_CHUNKS = 3
"""Chunks of memory in which a restore or a command examines a generation."""
DELETED_AT_ONCE = 3
"""Generations that are deleted at the same time, so that they share the waits for the disk."""
DELETIONS_AHEAD = 2
"""Generations that are deleted before a save reserves its space, at most."""
BACKLOG_LIMIT = 2
"""With more unverified generations than this, a save waits until one has been verified."""
UNREAD_LIMIT = 10
"""The same on a tier that deletes old generations by itself, where a backlog fills no disk."""

assert READ_LIMIT <= WORKERS, "each chunk that is read from a disk at once has a thread"
assert min(UPKEEP_CHUNKS, EXAMINATION_CHUNKS) >= 2, "one chunk is read while another one is examined"
assert DELETED_AT_ONCE <= WORKERS, "each deletion has a thread"
assert DELETIONS_AHEAD > 1, "a save adds one generation, so a run that holds too many shrinks with every save"
assert BACKLOG_LIMIT <= UNREAD_LIMIT

# ---- ranks -------------------------------------------------------------------------------------------------------

STEP_HISTORY = 2 * MAX_IN_FLIGHT
"""Each rank publishes the steps of so many last saves."""
SAVE_ROUNDS = 3 + 1 + 3 + 1
"""Rounds of agreement for one save, at most: exchange of structures, retry, replica check, commit."""
VERDICT_HISTORY = SAVE_ROUNDS * STEP_HISTORY
"""The coordinator keeps so many of its last verdicts in the store."""
RANK_TIMEOUT_SECONDS = 120.0
"""How long the coordinator waits for the other ranks by default; a user sets it with `lastgood.Ranks(patience=...)`."""
COORDINATOR_TIMEOUTS = 2
"""For how many of these timeouts the other ranks wait for the coordinator."""
POLLS_PER_TIMEOUT = 60
"""The first poll in a wait comes after timeout / POLLS_PER_TIMEOUT. A rendezvous reads all nonces again as often."""
QUICK_STORE_SECONDS = 5.0
"""The timeout of calls to the store that must not block for long: those of the training thread, and polls in a wait."""
ANNOUNCEMENT_POLL_SECONDS = 1.0
"""The time between two polls for announcements. After a failed one it is doubled, and doubled again."""
LEAD_POLLS, LEAD_POLLS_LIMIT = 2.0, 16.0
"""How many polls ahead of its step something is announced, at first and at most."""

assert STEP_HISTORY > MAX_IN_FLIGHT, "a rank still publishes the step of every save that another rank may wait for"
assert VERDICT_HISTORY > SAVE_ROUNDS * MAX_IN_FLIGHT, "the verdicts on all saves in flight are kept"
assert COORDINATOR_TIMEOUTS >= 2, "the coordinator waits one timeout for the other ranks before it publishes a verdict"
assert QUICK_STORE_SECONDS < RANK_TIMEOUT_SECONDS, "a poll in a wait ends before the wait does"
assert 2 <= LEAD_POLLS <= LEAD_POLLS_LIMIT, "a rank that polled just before an announcement polls again before its step"

# ---- the wire between nodes --------------------------------------------------------------------------------------

WIRE_RECORD_LIMIT_BYTES = 256 << 10
"""The longest request, and the longest record of an answer. What is longer travels as bulk bytes."""
WIRE_OVERHEAD_BYTES = 4096
"""A message is longer than the record in it by less than this; messages of the handshake are shorter than this."""
WIRE_BODY_LIMIT_BYTES = WIRE_RECORD_LIMIT_BYTES + WIRE_OVERHEAD_BYTES
"""The longest body of a frame."""
WIRE_BULK_LIMIT_BYTES = CHUNK_LIMIT_BYTES
"""The most bulk bytes of one request or of one answer: the largest chunk."""
WIRE_IDLE_SECONDS = 600.0
"""After this time without a request, a server closes a connection."""
WIRE_REUSE_SECONDS = 300.0
"""After this time without a request, a client does not use a connection again."""
WIRE_PIECE_BYTES, WIRE_PIECES = 2 << 20, 2
"""Where peers write bulk bytes into memory of this node: the length of a piece, and how many are under way at most."""

assert WIRE_BULK_LIMIT_BYTES >= CHUNK_LIMIT_BYTES, "every chunk that a manifest may name fits one request"
assert WIRE_BODY_LIMIT_BYTES < 2**31 and WIRE_BULK_LIMIT_BYTES < 2**31, "lengths fit the fields of a frame"
assert WIRE_REUSE_SECONDS < WIRE_IDLE_SECONDS, "a client gives a connection up before its server does"

# ---- drills --------------------------------------------------------------------------------------------------------

DRILL_SHARE = 4
"""A drill gets one part of so many of what is free, on each node; the rest stays for the job."""
DRILL_IDLE_SECONDS = 300.0
"""So long a drill may make no call to a node before its copies there are removed."""
DRILL_KEEP_SECONDS = 60.0
"""How often a drill makes a call to each node with copies: to read those of one node may take longer than that."""

assert DRILL_SHARE >= 3, "the copies are two generations at most, and as much is left for the next save of the job"
assert 3 * DRILL_KEEP_SECONDS < DRILL_IDLE_SECONDS, "copies stay though two calls after another were lost"

# ---- the training loop -------------------------------------------------------------------------------------------

MEMORY_LEAST_BYTES = 1 << 20
"""The least memory to which a user may bound the buffers of a run."""
STAGING_CHUNKS = 4
"""Bounded memory is divided into so many chunks at least, so that some are filled while others are written."""
ENTRIES_SEARCHED = 1000
"""Each step looks for samplers in dicts and lists of at most so many entries. Longer ones are the records of a loop."""
STEPS_REMEMBERED = 10_000
"""Steps of the loop among which a rank finds the one at which a save was announced that it received too late."""

assert MEMORY_LEAST_BYTES // STAGING_CHUNKS >= PAGE_BYTES, "a chunk of bounded memory has a page at least"
assert STEPS_REMEMBERED > STEP_HISTORY, "a step that other ranks may still wait for is remembered"

# ---- slots -------------------------------------------------------------------------------------------------------

SLOT_LIMIT = 100
"""Slots have names of two digits."""
SLOTS_BESIDE = 2
"""Slots that no save in flight may use: the newest commit, and the newest verified generation before it."""
SLOTS_UNTIL_AGREED = 1
"""With several ranks: what all of them have committed last stays until they have committed a newer generation."""
SLOT_LIMIT_BYTES = 1 << 60
"""The largest offset in a slot that a table may name."""
TABLE_AREA_BYTES = 64 << 10
"""The least length of each of the two areas of the table's file."""

assert MAX_IN_FLIGHT + SLOTS_BESIDE + SLOTS_UNTIL_AGREED <= SLOT_LIMIT, (
    "there is a slot for every save in flight that a user may ask for"
)
assert TABLE_AREA_BYTES % DIRECT_IO_BYTES == 0 and TABLE_AREA_BYTES <= RECORD_LIMIT_BYTES
assert SLOT_LIMIT_BYTES < 2**63, "offsets in a slot fit the system's signed file offsets"

# ---- parity ------------------------------------------------------------------------------------------------------

CODE_WORD_LIMIT = 256
"""Data and parity cells of a row, at most: the field GF(2^8) has so many elements."""
CELL_BYTES = 256 << 10
"""The length of a cell, unless the state is very small or very large."""
CELL_COUNT_LIMIT = 1 << 20
"""The number of cells of a generation, at most: larger states have larger cells."""
CELL_LIMIT_BYTES = 256 << 20
"""The largest cell that a record of parity may name: a reader holds two rows in memory."""
ISAL_CELL_LIMIT_BYTES = 2**31
"""ISA-L takes the length of a cell as a C int."""

assert CELL_BYTES % PAGE_BYTES == CELL_LIMIT_BYTES % PAGE_BYTES == 0 and CELL_BYTES <= CELL_LIMIT_BYTES
assert CELL_LIMIT_BYTES < ISAL_CELL_LIMIT_BYTES
# With one data cell a row there are as many parity cells in a file as data cells: two digests for each, in quotes.
assert 2 * CELL_COUNT_LIMIT * (DIGEST_LIMIT_CHARACTERS + 3) + RECORD_LIMIT_BYTES < PARITY_RECORD_LIMIT_BYTES
