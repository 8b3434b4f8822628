"""The forward over a few nodes as CUDA graphs: recorded once for each bucket of rows, nodes and columns, then replayed.

Python launches the hundreds of kernels of a small step more slowly than a GPU runs them; a graph is one launch. What is
recorded are addresses: inputs are copied to tensors of a fixed place, keys and values lie in an arena and never move,
and nothing between the two is asked of the host. The recorder is handed in: `on_cuda`, or a test's own on a CPU.
Shape letters: B rows, N tree nodes, C cache columns.
"""

import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_cli.contracts import Seen
from medusa_cli.model.cache import Place, TreeCache, numbers_on
from medusa_cli.model.forwards import Work
from medusa_cli.model.runners.kv_arena import COLUMNS, Arena
from medusa_cli.trees.tree import TokenTree

NODES = (1, 2, 4, 8, 16, 24, 32, 48, 64)  # a draft in between is padded; beyond, arithmetic hides the launches
MOST_GRAPHS = 32
MOST_BYTES = 2**30  # of logits and hidden states, which each graph holds for itself
WARM_UPS = 2  # kernels are chosen and workspaces made before anything is recorded


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recorded:
    """A forward that `replay` runs anew over whatever its inputs hold by then; what it shows is always in `seen`."""

    seen: Seen
    replay: Callable[[], None]


Recorder = Callable[[Callable[[], Seen]], Recorded]


@dataclass(frozen=True)
class Bucket:
    """What a recorded forward fits: rows, nodes, columns that attention is over, and the inner layers that it shows."""

    rows: int
    nodes: int
    columns: int
    taps: tuple[int, ...] = ()

    @classmethod
    def of(cls, lengths: Sequence[int], num_nodes: int, taps: tuple[int, ...] = ()) -> "Bucket":
        """The smallest for rows of these lengths: at most an eighth of long columns is padding."""
        nodes = next(size for size in NODES if size >= num_nodes)
        used = max(lengths) + nodes
        step = max(256, 1 << max(0, used.bit_length() - 4))
        return cls(len(lengths), nodes, -(-used // step) * step, taps)


class Inputs:
    """What a recorded forward reads: tokens, who is above whom, and the committed tokens of each row."""

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        self.bucket = bucket
        self.tokens_BN = torch.zeros(bucket.rows, bucket.nodes, dtype=torch.long, device=device)
        eye_NN = torch.eye(bucket.nodes, dtype=torch.bool, device=device)
        self.ancestors_XNN = eye_NN.repeat(bucket.rows, 1, 1)
        self.lengths_B = torch.zeros(bucket.rows, dtype=torch.long, device=device)

    def fill(self, tokens_BN: Tensor, tree: TokenTree, lengths: Sequence[int]) -> None:
        """Take a draft. Padding keeps what it held: no node of the draft looks at what stands after it."""
        count = tree.num_nodes
        self.tokens_BN[:, :count] = tokens_BN
        self.ancestors_XNN[:, :count, :count] = tree.ancestors_XNN
        self.lengths_B.copy_(numbers_on(self.lengths_B.device, lengths))

    @property
    def num_nodes(self) -> int:
        """N of the bucket."""
        return self.bucket.nodes

    @property
    def depths_XN(self) -> Tensor:
        """Computed where it is asked for: within the recorded forward."""
        return self.ancestors_XNN.sum(-1) - 1

    def place(self) -> Place:
        """Each row's columns, likewise computed within."""
        nodes_N = torch.arange(self.num_nodes, device=self.lengths_B.device)
        columns_BN = self.lengths_B[:, None] + nodes_N
        return Place(slice(0, self.bucket.rows), columns_BN, None, self.bucket.columns)


class GraphedForward:
    """Recorded forwards by bucket, the least recently used one forgotten first.

    forward   (inputs, cache) -> what the model shows for them; runs once or a few times while it is recorded
    """

    def __init__(self, forward: Callable[[Inputs, TreeCache], Seen], record: Recorder, device: torch.device) -> None:
        self.arena = Arena()
        self._forward = forward
        self._record = record
        self._device = device
        self._recorded: OrderedDict[Bucket, tuple[Inputs, Recorded]] = OrderedDict()
        self._unrecorded: set[Bucket] = set()  # memory didn't hold what these need
        self._moves = 0

    def takes(self, work: Work) -> bool:
        """All of few nodes, over the cache that has the arena."""
        lent = self.arena.is_lent_to(work.cache) and work.cache.layers[0].is_initialized
        return work.is_plain_step and work.tree.num_nodes <= NODES[-1] and lent

    def lend_to(self, cache: TreeCache) -> None:
        """Let an empty cache keep its keys and values in the arena, unless another one does."""
        self.arena.lend_to(cache)

    def columns_for(self, longest: int, num_nodes: int) -> int:
        """Columns that the arena has for so many committed tokens and a draft under them."""
        recorded = num_nodes <= NODES[-1]
        used = Bucket.of([longest], max(1, num_nodes)).columns if recorded else longest + num_nodes
        return -(-used // COLUMNS) * COLUMNS

    def release(self) -> None:
        """Give back what is held for texts to come; what they need is made and recorded anew. Not beside a cache."""
        if not self.arena.is_lent:
            self.arena.give_up()
            self._forget()

    def __call__(self, work: Work) -> Seen:
        """Score all nodes. What is returned lies where the next forward writes: it holds for one step."""
        tokens_BN, tree, cache = work.tokens_BN, work.tree, work.cache
        num_rows, num_nodes = tokens_BN.shape
        lengths = cache.lengths[:num_rows]
        bucket = Bucket.of(lengths, num_nodes, work.taps)
        for layer in cache.layers:
            layer.make_room(bucket.columns)
        if self._moves != self.arena.moves:
            self._forget()
        found = self._fitting(bucket, tokens_BN, tree, cache)
        if found is None:
            inputs = self._filled(bucket, tokens_BN, tree, lengths)
            seen = self._forward(inputs, cache)
        else:
            inputs, recorded = found
            inputs.fill(tokens_BN, tree, lengths)
            recorded.replay()
            seen = recorded.seen
        taps_BNLH = None if seen.taps_BNLH is None else seen.taps_BNLH[:, :num_nodes]
        return Seen(seen.hidden_BNH[:, :num_nodes], seen.logits_BNV[:, :num_nodes], taps_BNLH)

    def _filled(self, bucket: Bucket, tokens_BN: Tensor, tree: TokenTree, lengths: Sequence[int]) -> Inputs:
        inputs = Inputs(bucket, self._device)
        inputs.fill(tokens_BN, tree, lengths)
        return inputs

    def _fitting(
        self, bucket: Bucket, tokens_BN: Tensor, tree: TokenTree, cache: TreeCache
    ) -> tuple[Inputs, Recorded] | None:
        """The recorded forward of this bucket, recorded now if it wasn't; None where memory doesn't hold it."""
        if bucket in self._recorded:
            self._recorded.move_to_end(bucket)
        elif bucket in self._unrecorded:
            return None
        else:
            # recording runs it, and writes where this says
            inputs = self._filled(bucket, tokens_BN, tree, cache.lengths[: bucket.rows])
            try:
                self._recorded[bucket] = inputs, self._record(lambda: self._forward(inputs, cache))
            except RuntimeError as error:
                if not _is_out_of_memory(error):
                    raise
                logger.info("no memory for a graph of %s: it runs as it is", bucket)
                self._recorded.clear()
                self._unrecorded.add(bucket)
                return None
            while len(self._recorded) > 1 and (len(self._recorded) > MOST_GRAPHS or self._bytes() > MOST_BYTES):
                self._recorded.popitem(last=False)
        return self._recorded[bucket]

    def _bytes(self) -> int:
        """What all recorded forwards show."""
        every = (recorded.seen for _, recorded in self._recorded.values())
        shown = (each for seen in every for each in (seen.hidden_BNH, seen.logits_BNV, seen.taps_BNLH))
        return sum(each.nbytes for each in shown if each is not None)

    def _forget(self) -> None:
        self._recorded.clear()
        self._unrecorded.clear()
        self._moves = self.arena.moves


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether this is what it comes from: the end of a recording that broke off may fail as well."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error is not None


def on_cuda(device: torch.device) -> Recorder:
    """Records on this GPU; its graphs share one pool of memory, since one runs at a time.

    RuntimeError where a forward asks something of the host, as some mixtures of experts do.
    """
    # a stream of its own: the library's lies on whichever GPU was first, and warm-ups must leave their workspaces here
    side = torch.cuda.Stream(device)
    living: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
    pool = torch.cuda.graph_pool_handle()

    def record(run: Callable[[], Seen]) -> Recorded:
        nonlocal pool
        if not living:
            pool = torch.cuda.graph_pool_handle()  # one whose last graph has gone can't be used again
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device):
            here = torch.cuda.current_stream()
            side.wait_stream(here)
            # around the recording too: it doesn't find back to this stream when its end fails
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    run()
                # other threads may use the GPU meanwhile, as those that watch over several processes do
                with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
                    seen = run()
            here.wait_stream(side)
        living.add(graph)
        return Recorded(seen, graph.replay)

    return record
