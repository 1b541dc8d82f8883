"""Explains why a launcher cannot take part in its job."""

from __future__ import annotations

from paceline.errors import PacelineError
from paceline.launching.members.record import Record, Terms
from paceline.launching.members.waits import Waits

_LOST_TOO_OFTEN = 5
_HOLD_S = 10.0
_HOLD_GROWTH = 3


def explain_store(name: str, why: str, waited_s: float | None = None) -> PacelineError:
    """Return the error of a launcher whose store does not answer."""
    waited = "" if waited_s is None else f" for {waited_s:g} s (--join-timeout)"
    return PacelineError(
        "PL381",
        saw=f"The store {name} did not answer{waited}: {why}.",
        rule="The nodes of a job meet in this store, which --rdzv-backend and --rdzv-endpoint name.",
        fix="Check the address, and the servers, or the folder and its permissions. With c10d, start the "
        "same command on the node of the endpoint, at a free port.",
    )


def explain_lost_store(name: str, why: str) -> PacelineError:
    """Return the error of a launcher that no longer reaches the node with the store of its job."""
    error = PacelineError(
        "PL372",
        saw=f"The node with the store of this job ({name}) is lost, or this node is cut off from it: {why}. "
        "The ranks of this node were ended.",
        rule="With --rdzv-backend c10d, the node of --rdzv-endpoint holds the store. The job ends with it, "
        "and goes on without a node that is cut off.",
        fix="Start the same command again: it joins the job, or goes on from the last save. With "
        "--rdzv-backend etcd or folder, a job survives the loss of any node.",
    )
    error.exit_code = 75
    return error


def explain_wait(waits: Waits, terms: Terms, record: Record, key: str) -> PacelineError:
    """Return the error of a launcher that has waited too long for other nodes."""
    missing = [f"{name} ({why})" for name, why in record.gone.values()]
    refused = [f"{name}: {why}" for name, why in sorted(record.refused.items())]
    present = len({key, *record.nodes})
    return PacelineError(
        "PL375",
        saw=f"{present} of at least {terms.least} nodes were there after {waits.join_s:g} s (--join-timeout)."
        + (f" Missing: {'; '.join(missing)}." if missing else "")
        + (f" Refused: {'; '.join(refused)}." if refused else ""),
        rule="A job never trains on fewer nodes than the minimum of --nnodes.",
        fix="Start the same command on the missing nodes, or "
        + (
            f"use a range such as --nnodes {terms.least - 1}:{terms.most}, for a job that goes on with fewer."
            if terms.least == terms.most > 1
            else "lower MIN of --nnodes MIN:MAX."
        ),
    )


def explain_refusal(text: str) -> PacelineError:
    """Return the error of a launcher that does not fit into the job."""
    return PacelineError(
        "PL376",
        saw=f"This node does not fit into the job: {text}.",
        rule="All nodes of a job run the same command on the same files.",
        fix="Use the same --nnodes, files and versions on all nodes; for another job, choose another "
        "--rdzv-id.",
    )


def find_hold_s(losses: int) -> float:
    """Return how long a machine that was lost so often waits before it joins the next round."""
    if losses >= _LOST_TOO_OFTEN:
        raise PacelineError(
            "PL386",
            saw=f"This node was lost {losses} times.",
            rule=f"A job takes a node back that was lost fewer than {_LOST_TOO_OFTEN} times: each loss and "
            "each return makes all ranks start again.",
            fix="Check this node's network and memory, or leave it out of the job.",
        )
    return 0.0 if losses < 2 else _HOLD_S * float(_HOLD_GROWTH ** (losses - 2))
