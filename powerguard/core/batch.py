"""The jobs of one batch of words, which may be changed in place until the batch is over."""

from __future__ import annotations

from msgspec.structs import replace

from powerguard.core.job import Job, Member, Node, Order


class Batch:
    """The jobs of one batch of words. A leader hears of thousands of ranks at once, so their dicts are copied once and
    then changed in place, and the ranks of a node are found without looking at all of them.
    """

    def __init__(self) -> None:
        self._owned: set[str] = set()
        self._indexed: tuple[dict[int, Member], dict[str, set[int]]] = ({}, {})

    def own(self, job: Job) -> Job:
        """The job, with dicts that nobody else has."""
        if job.name in self._owned:
            return job
        self._owned.add(job.name)
        return replace(
            job,
            members=dict(job.members),
            nodes=dict(job.nodes),
            order=_apart(job.order),
            earlier=_apart(job.earlier),
        )

    def ranks(self, job: Job, node: str) -> set[int]:
        """The ranks of *node*, to be kept up with `job.members`."""
        members, index = self._indexed
        if members is not job.members:
            index = {}
            for rank, member in job.members.items():
                index.setdefault(member.node, set()).add(rank)
            self._indexed = (job.members, index)
        return index.setdefault(node, set())


def _apart(order: Order | None) -> Order | None:
    return None if order is None else replace(order, parts=dict(order.parts))


def with_node(job: Job, node: Node) -> Job:
    """The job of a batch, with what is known of *node*."""
    job.nodes[node.name] = node  # ours: see Batch
    return job
