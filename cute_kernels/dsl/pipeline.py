"""The TMA -> WGMMA ring of shared-memory stages, with multicast over a cluster."""

import cutlass
from cutlass import cute, pipeline


def tma_ring(
    barriers: cute.Pointer,
    stages: int,
    bytes_per_stage: int,
    consumer_warps: int,
    cluster: cute.Layout,
) -> pipeline.PipelineTmaAsync:
    """Create a ring; the caller synchronises the cluster before it uses the ring.

    A stage is full when its bytes have landed, and empty when every consumer warp of every CTA
    that shares its data has released it.
    """
    cluster_m, cluster_n = cluster.shape[0], cluster.shape[1]
    sharers = cluster_m + cluster_n - 1
    return pipeline.PipelineTmaAsync.create(
        barrier_storage=barriers,
        num_stages=stages,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, sharers * consumer_warps),
        tx_count=bytes_per_stage,
        cta_layout_vmnk=cute.make_layout((1, *cluster.shape)),
        defer_sync=True,
    )


def producer_state(stages: int) -> pipeline.PipelineState:
    """Initial state of the producer of a ring: every stage counts as empty."""
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, stages)


def consumer_state(stages: int) -> pipeline.PipelineState:
    """Initial state of a consumer of a ring."""
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, stages)


def announce_barriers(cluster: tuple[int, int]) -> None:
    """Publish the rings' barriers to the cluster, without waiting; call it after they are made."""
    pipeline.pipeline_init_arrive(cluster_shape_mn=cluster, is_relaxed=True)


def await_barriers(cluster: tuple[int, int]) -> None:
    """Wait until every CTA of the cluster has made its barriers; call it before a ring is used."""
    pipeline.pipeline_init_wait(cluster_shape_mn=cluster)


def multicast_mask(
    cluster: cute.Layout, rank: cute.Coord, mode: int, sharers: int
) -> cutlass.Int16 | None:
    """Mask of the CTAs that receive a load of CTA ``rank``; None where nothing is shared."""
    return cute.make_layout_image_mask(cluster, rank, mode=mode) if sharers > 1 else None
