"""Who a process is among its ranks, from what launchers say."""

from __future__ import annotations

import pytest

from powerguard.errors import UsageError
from powerguard.train.identity import Identity, find_identity

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "run7",
}
SRUN = {"SLURM_JOB_ID": "123", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "4"}


def test_torchrun():
    """Everything that torchrun sets is used."""
    assert find_identity(TORCHRUN) == Identity("run7", 5, 1, 8, "node1")


def test_torchrun_without_a_run_id_is_known_by_its_rendezvous():
    """ "none" is the default of every torchrun: two of them on one node must not be one job."""
    env = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}

    assert find_identity(env).job == "node1:29500"


def test_srun():
    """Slurm's numbers count inside a step only: a batch script is one process, however many tasks its job has."""
    assert find_identity(SRUN) == Identity("123", 2, 0, 4)
    batch = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_NUM_TASKS"}
    assert find_identity(batch, pid=77) == Identity("123.77", 0, 0, 1)


def test_slurm_names_the_job_that_torchrun_numbers():
    """With both, the job is Slurm's and the ranks are torchrun's; POWERGUARD_JOB_ID beats both."""
    env = {**TORCHRUN, **SRUN}
    assert find_identity(env) == Identity("123", 5, 1, 8, "node1")
    assert find_identity({**env, "POWERGUARD_JOB_ID": "mine"}).job == "mine"


def test_alone_a_process_is_a_job_of_its_own():
    """Nothing set: one rank, named by its pid, so that two don't collide; a name that is given stays."""
    assert find_identity({}, pid=42) == Identity("process.42", 0, 0, 1)
    assert find_identity({}, job="lone", pid=42).job == "lone"


def test_what_is_told_wins():
    """Arguments beat the process group, which beats the environment."""
    assert find_identity(TORCHRUN, job="a", rank=1, local_rank=0, world_size=2) == Identity("a", 1, 0, 2, "node1")
    assert find_identity(TORCHRUN, group=(3, 4)).rank == 3
    assert find_identity(TORCHRUN, group=(3, 4)).world_size == 4


@pytest.mark.parametrize(
    ("env", "given"),
    [
        ({"RANK": "x"}, {}),
        ({"RANK": "2", "WORLD_SIZE": "2"}, {}),
        ({}, {"rank": -1}),
        ({}, {"rank": 0, "world_size": 2}),  # nothing names the job
        ({}, {"job": "x" * 300}),
    ],
)
def test_what_makes_no_rank_is_said(env, given):
    """Each mistake is one error with what to do."""
    with pytest.raises(UsageError) as caught:
        find_identity(env, **given)

    assert caught.value.todo
