"""The gradients of rms_norm and layer_norm, on SM90: dx, and parts of dweight and dbias.

    x̂ = (h - mean) rstd;  g = dy (weight + offset)
    dx = dh + rstd (g - mean(g) - x̂ mean(g x̂)),  mean(g) of a layer norm only
    dweight = Σ_m dy x̂;  dbias = Σ_m dy, of the rows of a part

Layout       dy, dh, h, dx [M, 8 ⌈D / 8⌉], zeros behind D, rows at multiples of 16 bytes; weight
             likewise; mean, rstd fp32 [M]; parts fp32 [P, 8 ⌈D / 8⌉]; inverse: 1 / D.
Order        over a row as in the forward kernel.  Over the rows of a part: its rows are dealt to
             the groups of a CTA in runs of neighbours; a group adds its own ascending, one fma
             each; groups ascending.
Work         a CTA for a part, of which more than CTAs are walked through; the next rows are under
             way while one is summed, those of the next part among them: wide ones by the copy
             engine (device/bulk.py), others by their threads (device/ahead.py).  The kernel that
             adds the parts is launched while this one runs.
Measured     docs/status.md.
"""

import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from ..compile import fake
from ..dsl import copy
from .config import LAYER, PAD, UNIT, BackwardConfig, backward_residency, part_rows
from .device import rows
from .device.ahead import Ahead
from .device.bulk import Bulk
from .device.rows import WARP, Group

#: Elements of a sum that a thread stores at once.
QUAD = 4


class NormBackwardSm90:
    """One configuration of the kernel; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: BackwardConfig):
        self.config = config
        self.dtype = fake.DTYPES[config.dtype]
        self.group = Group(config.threads, config.units)
        held = backward_residency(config)
        self.threads = held.threads
        self.groups = self.threads // config.threads
        self.layer = config.kind == LAYER
        # Of a part, and of a group of it.
        self.rows = part_rows(config.threads * self.group.size)
        self.run = self.rows // self.groups
        # Of a sum in shared memory: (quads of a thread, threads).
        self.quads = (self.group.size // QUAD, config.threads + PAD)
        tensors, numbers = 2 + config.upstream, 1 + self.layer
        self.stages, self.bulk = held.stages, held.bulk
        ring = self.group, self.dtype, tensors, numbers, held.stages
        self.ring = Bulk(*ring, self.groups) if self.bulk else Ahead(*ring)

    @cute.jit
    def __call__(
        self,
        mDy: cute.Tensor,
        mDh: cute.Tensor | None,
        mH: cute.Tensor,
        mMean: cute.Tensor | None,
        mRstd: cute.Tensor,
        mWeight: cute.Tensor,
        mDx: cute.Tensor,
        mWeightParts: cute.Tensor,
        mBiasParts: cute.Tensor | None,
        offset: cutlass.Float32,
        inverse: cutlass.Float32,
        ctas: cutlass.Int32,
        stream,
    ):
        parts = (mWeightParts, mBiasParts)
        self.kernel((mDy, mH, mDh), (mMean, mRstd), mWeight, mDx, parts, (offset, inverse)).launch(
            grid=(ctas, 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=1,
            # In percent.  Without it the compiler would ask a device, and a host may have none.
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, read: tuple, stats: tuple, mWeight, mDx, parts: tuple, numbers: tuple):
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        m, count = mDx.shape[0], parts[0].shape[0]
        # The kernel that adds the parts may come to the SMs now; it waits for this one's end.
        cute.arch.griddepcontrol_launch_dependents()
        group, lane = tidx // self.group.threads, tidx % self.group.threads
        allocator = SmemAllocator()
        # Of a row's one or two sums; another row's are elsewhere.
        slots = 1 + self.layer
        layout = cute.make_ordered_layout(
            (2 * slots, self.groups, self.group.warps), order=(2, 1, 0)
        )
        sPartials = allocator.allocate_tensor(cutlass.Float32, layout, byte_alignment=16)
        sSums = None
        if cutlass.const_expr(self.groups > 1):
            shape = (1 + self.layer, self.groups, *self.quads, QUAD)
            layout = cute.make_ordered_layout(shape, order=(4, 3, 2, 1, 0))
            sSums = allocator.allocate_tensor(cutlass.Float32, layout, byte_alignment=16)
        read = [t for t in read if t is not None]
        stats = [t for t in stats if t is not None]
        stages, ring = self.stages, None
        # Where the next row comes from; the phase is that of its barrier.
        stage, phase, slot = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
        # The row that is asked for next: of which part, and its number in the group's run.
        asked, number = block, cutlass.Int32(0)
        if cutlass.const_expr(self.bulk):
            ring = self.ring.allocate(allocator, group, lane, mDx.shape[1])
        elif cutlass.const_expr(stages > 0):
            warp = cute.arch.make_warp_uniform(tidx // WARP)
            ring = self.ring.allocate(allocator, self.threads, warp)
        for d in cutlass.range_constexpr(stages):
            early = self.place(asked, number, count, m, group, lane)
            self.ring.fetch(ring, d, read, stats, early)
            asked, number = self.after(asked, number, ctas)
        weight = self.group.load_vector(mWeight, lane)
        offset, inverse = numbers
        for part in cutlass.range(block, count, ctas, unroll=1):
            sums = [self.zeros(), self.zeros()] if self.layer else [self.zeros()]
            for r in cutlass.range(self.run, unroll=1):
                row, there, _ = self.place(part, r, count, m, group, lane)
                if cutlass.const_expr(self.bulk):
                    raws, numbers_of = self.ring.taken(ring, stage, phase, there, lane)
                elif cutlass.const_expr(stages > 0):
                    self.ring.wait()
                    raws = [self.ring.taken(ring, stage, i) for i in range(len(read))]
                    numbers_of = [self.ring.scalar(ring, stage, i) for i in range(len(stats))]
                else:
                    raws = [self.group.load(t, row, lane, there) for t in read]
                    numbers_of = [self.statistic(t, row, there) for t in stats]
                dy, x_hat = rows.widened(raws[0]), rows.widened(raws[1])
                self.add(dy, x_hat, sums, numbers_of)
                at = (sPartials, slot * slots, group, lane)
                means = self.means(dy, x_hat, (weight, offset), at, inverse)
                slot = slot ^ 1
                if cutlass.const_expr(stages > 0):
                    # Behind the sums all threads of the row have taken their elements.
                    ask = self.place(asked, number, count, m, group, lane)
                    self.ring.fetch(ring, stage, read, stats, ask)
                    asked, number = self.after(asked, number, ctas)
                    last = stage == stages - 1
                    stage = cutlass.Int32(0) if last else stage + 1
                    phase = phase ^ 1 if last else phase
                self.finish(dy, x_hat, raws[2:], means, numbers_of[-1])
                self.group.store(rows.narrowed(dy, self.dtype), mDx, row, lane, there)
            self.give(sums, parts[: len(sums)], sSums, part, group, lane)

    @cute.jit
    def place(self, part, number, count, m, group, lane) -> tuple:
        """(row, whether it is there, the thread's number in it) of a row of a group's run."""
        row = part * self.rows + group * self.run + number
        return row, (part < count) & (row < m), lane

    @cute.jit
    def after(self, part, number, ctas) -> tuple:
        """What a CTA reads next: (part, number)."""
        number = number + 1
        last = number == self.run
        return (part + ctas if last else part), (cutlass.Int32(0) if last else number)

    @cute.jit
    def zeros(self) -> cute.Tensor:
        """fp32 of a thread's elements."""
        values = cute.make_rmem_tensor(cute.make_layout(self.group.size), cutlass.Float32)
        values.fill(0.0)
        return values

    @cute.jit
    def statistic(self, tensor: cute.Tensor, row, there):
        """A number of a row; 0 of one that is not there, whose share is 0 then."""
        value = cutlass.Float32(0.0)
        if there:
            value = tensor[row]
        return value

    @cute.jit
    def add(self, dy, x_hat, sums: list, stats: list):
        """h becomes x̂; the row's share of dweight and dbias is added.

        Behind the last column dy is 0, and with it each share.
        """
        rstd = stats[-1]
        for i in cutlass.range_constexpr(self.group.size):
            if cutlass.const_expr(self.layer):
                x_hat[i] = cute.math.fma(x_hat[i], rstd, -stats[0] * rstd)
                sums[1][i] = sums[1][i] + dy[i]
            else:
                x_hat[i] = x_hat[i] * rstd
            sums[0][i] = cute.math.fma(dy[i], x_hat[i], sums[0][i])

    @cute.jit
    def means(self, dy, x_hat, scale: tuple, at: tuple, inverse) -> list:
        """dy becomes g.  mean(g x̂), and of a layer norm mean(g)."""
        weight, offset = scale
        of_g = cutlass.Float32(0.0)
        of_products = cutlass.Float32(0.0)
        for i in cutlass.range_constexpr(self.group.size):
            dy[i] = dy[i] * (weight[i].to(cutlass.Float32) + offset)
            of_products = cute.math.fma(dy[i], x_hat[i], of_products)
            if cutlass.const_expr(self.layer):
                of_g = of_g + dy[i]
        wanted = [of_products, of_g] if self.layer else [of_products]
        return [total * inverse for total in self.group.sums(wanted, *at)]

    @cute.jit
    def finish(self, g, x_hat, dh: list, means: list, rstd):
        """g becomes dx; in fp32."""
        added = [rows.widened(t) for t in dh]
        for i in cutlass.range_constexpr(self.group.size):
            inner = cute.math.fma(-x_hat[i], means[0], g[i])
            # dx is rstd inner and these.
            terms = [t[i] for t in added] + [-mean * rstd for mean in means[1:]]
            if cutlass.const_expr(len(terms) > 0):
                g[i] = cute.math.fma(inner, rstd, sum(terms[1:], terms[0]))
            else:
                g[i] = inner * rstd

    @cute.jit
    def give(self, sums: list, parts: tuple, sSums, part, group, lane):
        """The groups' sums, added ascending, to a row of the parts."""
        columns = parts[0].shape[1]
        base = cutlass.Int64(part) * parts[0].stride[0]
        if cutlass.const_expr(self.groups == 1):
            for total, mParts in zip(sums, parts):
                for v in cutlass.range_constexpr(self.group.units):
                    c = self.group.column(v, lane)
                    if c < columns:
                        for a in cutlass.range_constexpr(UNIT // QUAD):
                            target = copy.aligned(mParts, base + c + QUAD * a, QUAD)
                            target.store(rows.piece(total, v * UNIT + QUAD * a, QUAD).load())
        else:
            tidx, _, _ = cute.arch.thread_idx()
            cute.arch.sync_threads()
            for s, total in enumerate(sums):
                for i in cutlass.range_constexpr(self.group.size // QUAD):
                    sSums[s, group, i, lane, None].store(rows.piece(total, QUAD * i, QUAD).load())
            cute.arch.sync_threads()
            for c in cutlass.range(tidx * QUAD, columns, self.threads * QUAD, unroll=1):
                unit = c // UNIT
                i = unit // self.group.threads * (UNIT // QUAD) + c % UNIT // QUAD
                t = unit % self.group.threads
                for s, mParts in enumerate(parts):
                    total = sSums[s, 0, i, t, None].load()
                    for g in cutlass.range_constexpr(1, self.groups):
                        total = total + sSums[s, g, i, t, None].load()
                    copy.aligned(mParts, base + c, QUAD).store(total)


def build(config: BackwardConfig, compile=cute.compile):
    """Compiles one configuration against fake tensors; no GPU needed."""
    m, parts, columns = fake.size(), fake.size(), fake.size(UNIT)
    layer = config.kind == LAYER

    def matrix():
        return fake.matrix(config.dtype, m, columns, "k")

    def sums():
        return fake.compact(cutlass.Float32, (parts, columns), 16)

    return compile(
        NormBackwardSm90(config),
        matrix(),
        matrix() if config.upstream else None,
        matrix(),
        fake.vector("fp32", m) if layer else None,
        fake.vector("fp32", m),
        fake.compact(fake.DTYPES[config.weight], (columns,), 16),
        matrix(),
        sums(),
        sums() if layer else None,
        cutlass.Float32(0.0),
        cutlass.Float32(1.0),
        cutlass.Int32(1),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
