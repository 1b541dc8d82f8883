"""Describes the state of a job for people, and why it does not go on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import PacelineError
from paceline.launching.members.records import Address, Lost, Message, Peer, Terms
from paceline.launching.members.world import NodeWorld, Waits


def describe_job(
    description: Message,
    terms: Terms,
    world: NodeWorld | None,
    here: Sequence[Peer],
    lost: Mapping[str, Lost],
    now: float,
    *,
    is_over: bool,
) -> Message:
    """Return the state of a job: a launcher's description of itself, with a row per member.

    Args:
        description: of the launcher.
        terms: of the job.
        world: the last one; its members come first, by their numbers.
        here: this launcher and all that follow it.
        lost: members that have gone.
        now: the monotonic clock.
        is_over: whether the round of that world is over.
    """
    peers = {peer.member.key: peer for peer in here}
    members = list(world.members) if world is not None else []
    others = [peer.member for peer in here if peer.member not in members]
    is_running = world is not None and not is_over
    return {
        **description,
        "state": "final" if description["is_closed"] else "frozen" if is_running else "joinable",
        "round": 0 if world is None else world.round,
        "least": terms.least,
        "most": terms.most,
        "members": [
            {
                "name": member.name,
                "address": f"{member.address}:{member.port}",
                "number": members.index(member) if member in members else None,
                "is_here": member.key in peers,
                "beats": peers[member.key].beats if member.key in peers else None,
                "age_s": round(now - peers[member.key].heard_s, 2) if member.key in peers else None,
                "why": lost[member.key].why if member.key in lost and member.key not in peers else "",
            }
            for member in [*members, *others]
        ],
    }


def compare_terms(leader: str, ours: Terms, theirs: Terms) -> str:
    """Return what a node has that its leader does not, or the empty text."""
    nodes = f"{ours.least}:{ours.most}", f"{theirs.least}:{theirs.most}"
    if nodes[0] != nodes[1]:
        return f"{leader} has --nnodes {nodes[0]}, and this node has {nodes[1]}"
    known = dict.fromkeys([*ours.code, *theirs.code])
    labels = [label for label in known if ours.code.get(label) != theirs.code.get(label)]
    if not labels:
        return ""
    sides = [
        " and ".join(f"{label} {code[label]}" for label in labels if label in code) or "nothing of this"
        for code in (dict(ours.code), dict(theirs.code))
    ]
    return f"{leader} runs {sides[0]}, and this node runs {sides[1]}"


@dataclass(frozen=True)
class Lateness:
    """The state of a launcher that waits for a round.

    Attributes:
        waited_s: since when.
        is_alone: whether it knows of no launcher that leads, and of no world.
        is_stranger: whether it follows no leader, and is not in the last world.
        has_quorum: whether those that it reaches may decide.
        refusals: the reasons of other launchers that refused it.
        endpoints: where it asks.
        witness: why the witness does not answer; empty if it does, or if there is none.
        is_witness_wrong: whether what was named as the witness is none, so that waiting does not help.
        refused: nodes that this launcher has refused as the leader, each with the reason.
    """

    waited_s: float
    is_alone: bool
    is_stranger: bool
    has_quorum: bool
    refusals: Collection[str]
    endpoints: Collection[Address]
    witness: str
    is_witness_wrong: bool = False
    refused: Collection[str] = ()


def explain_lateness(
    state: Lateness,
    waits: Waits,
    terms: Terms,
    world: NodeWorld | None,
    present: Collection[str],
    lost: Mapping[str, Lost],
    now: float,
) -> PacelineError | None:
    """Return why a launcher gives up, or None while it is too early for that."""
    if state.is_stranger and state.refusals and state.waited_s > waits.detect_s:
        return explain_refusal(state.refusals)
    if state.is_witness_wrong:
        return explain_witness(state.witness)
    if state.waited_s <= waits.join_s:
        return None
    if state.witness:
        return explain_witness(state.witness, f" for {waits.join_s:g} s (--join-timeout)")
    if state.is_alone:
        return explain_absence(waits, terms, state.endpoints)
    facts = waits, terms, world, present, lost, now
    return explain_wait(*facts, has_quorum=state.has_quorum, refused=state.refused)


def explain_witness(why: str, waited: str = "") -> PacelineError:
    """Return the error of a launcher whose witness does not answer."""
    return PacelineError(
        "PL381",
        saw=f"The witness did not answer{waited}: {why}.",
        rule="Each round is recorded there before its ranks start.",
        fix="Check the address and the servers, or the folder and its permissions.",
    )


def explain_absence(waits: Waits, terms: Terms, endpoints: Collection[Address]) -> PacelineError:
    """Return the error of a launcher that has found no other one."""
    places = ", ".join(f"{address}:{port}" for address, port in endpoints)
    return PacelineError(
        "PL373",
        saw=f"No launcher of the job {terms.job!r} answered at {places} for {waits.join_s:g} s "
        "(--join-timeout).",
        rule="The nodes of a job meet at --rdzv-endpoint.",
        fix="Start the same command on the node of the endpoint, and check that this node reaches it.",
    )


def explain_wait(
    waits: Waits,
    terms: Terms,
    world: NodeWorld | None,
    present: Collection[str],
    lost: Mapping[str, Lost],
    now: float,
    *,
    has_quorum: bool,
    refused: Collection[str] = (),
) -> PacelineError:
    """Return the error of a job that has waited too long for members that are missing."""
    members = [] if world is None else [m for m in world.members if m.key not in present]
    missing = "; ".join(f"{member}{_describe_loss(lost.get(member.key), now)}" for member in members)
    waited = f"{waits.join_s:g} s (--join-timeout)"
    if world is not None and not has_quorum:
        return PacelineError(
            "PL374",
            saw=f"This node reached too few nodes of the last round for {waited}. Missing: {missing}.",
            rule="The nodes that go on must be more than half of the last round, or half of it with its "
            f"number 0 ({world.members[0]}), so that two parts never both train. Launchers that are known to "
            "have ended do not count.",
            fix="Restore the network between the nodes. If the missing nodes will not come back, start the "
            "job with another --rdzv-id.",
        )
    return PacelineError(
        "PL375",
        saw=f"{len(present)} of at least {terms.least} nodes were there after {waited}."
        + (f" Missing: {missing}." if missing else "")
        + (f" Refused: {'; '.join(sorted(refused))}." if refused else ""),
        rule="A job never trains on fewer nodes than the minimum of --nnodes.",
        fix="Start the same command on the missing nodes, or "
        + (
            f"use a range such as --nnodes {terms.least - 1}:{terms.most}, for a job that goes on with fewer."
            if terms.least == terms.most > 1
            else "lower MIN of --nnodes MIN:MAX."
        ),
    )


def explain_refusal(texts: Collection[str]) -> PacelineError:
    """Return the error of a launcher that the job has refused."""
    return PacelineError(
        "PL376",
        saw=f"This node was refused: {'; '.join(sorted(texts))}.",
        rule="All nodes of a job run the same command on the same files, and one endpoint serves one job.",
        fix="Use the same --nnodes, --rdzv-id, files and versions on all nodes; for another job, choose "
        "another --rdzv-id and port.",
    )


def _describe_loss(lost: Lost | None, now: float) -> str:
    return "" if lost is None else f", lost {now - lost.at_s:.0f} s ago ({lost.why})"
