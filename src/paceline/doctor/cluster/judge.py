"""Judges what was found of a cluster: pure functions from a survey to findings."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

from paceline.doctor.cluster.speed import RAN
from paceline.doctor.meeting_check import is_loopback
from paceline.finding import Finding
from paceline.phrases import join
from paceline.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from paceline.doctor.cluster.coordinator import Survey

# One TCP stream does not fill a faster link, so above this two links are alike.
_FAST = 1e9
_SLOW_LINK, _SLOW_NODE = 0.5, 0.6
_FREE = 0.8
_FAR, _FAR_S = 5.0, 2e-3
_RESENT = 0.01
_CLOCK_S, _DRIFT = 0.5, 1e-3
_WEAK_ALL_REDUCE = 0.1
# Variables that differ between nodes by their nature: devices, and folders on disks of their own.
_OWN_FACT = re.compile(r"\$.*_(DEVICES|IFNAME|HCA|HOME|DIR|PATH|FILE)")
_WAYS = {
    "between": "from each node, every other one",
    "of": "in both directions, it",
    "to": "from all other nodes, it",
    "from": "from it, every other node",
}
_ADVICE = {
    "refused": "Something answers there and turns the connection away: a firewall that rejects, or an "
    "address that "
    "belongs to another machine.",
    "silent": "Open the ports between the nodes: gloo and NCCL connect on ports that the system chooses "
    "(net.ipv4.ip_local_port_range).",
    "large": "Lower the MTU of the interface to what the path carries, or let routers answer that packets "
    "are too "
    "large (ICMP).",
}


def judge(survey: Survey) -> list[Finding]:
    """Return the findings of a survey, the most basic first; those of single machines are not among them."""
    found = [*_judge_presence(survey), *_judge_names(survey), *_judge_reach(survey)]
    found += [*_judge_links(survey), *_judge_speeds(survey), *_judge_clocks(survey), *_judge_facts(survey)]
    found += [*_judge_folder(survey), *_judge_collectives(survey)]
    return found


def find_slow_links(rates: Mapping[tuple[int, int], float]) -> list[tuple[int, int]]:
    """Return the (from, to) whose rate is below half of the usual one, the slowest first."""
    if len(rates) < 2:
        return []
    capped = {link: min(rate, _FAST) for link, rate in rates.items()}
    usual = find_usual_rate(capped)
    return sorted(
        (link for link, rate in capped.items() if rate < _SLOW_LINK * usual), key=capped.__getitem__
    )


def find_usual_rate(rates: Mapping[tuple[int, int], float]) -> float:
    """Return what the best quarter of the links reaches; of three nodes, a bad one has most of the links."""
    return sorted(rates.values(), reverse=True)[len(rates) // 4]


def find_slow_nodes(speeds: Mapping[int, Mapping[str, float]]) -> list[tuple[int, str, float]]:
    """Return (node, kind, share of the usual rate) of what is slow."""
    found = []
    if are_busy(speeds):
        return []
    for kind in {kind for rates in speeds.values() for kind in rates if kind != "error"}:
        rates = {node: rates[kind] for node, rates in speeds.items() if kind in rates}
        if len(rates) < 2:
            continue
        usual = max(rates.values()) if len(rates) == 2 else median(rates.values())
        found += [(node, kind, rate / usual) for node, rate in rates.items() if rate < _SLOW_NODE * usual]
    return sorted(found)


def are_busy(speeds: Mapping[int, Mapping[str, float]]) -> bool:
    """Return whether most nodes had to share their cores, as on one busy machine: speeds say nothing then."""
    ran = [rates[RAN] for rates in speeds.values() if RAN in rates]
    return len(ran) > 1 and (max(ran) if len(ran) == 2 else median(ran)) < _FREE


def _judge_presence(survey: Survey) -> Iterator[Finding]:
    missing = survey.num_wanted - len(survey.names)
    if missing > 0:
        yield Finding(
            "PL983",
            "cluster",
            saw=f"{missing} of {survey.num_wanted} nodes did not come; {join(survey.names or ['none'])} did.",
            rule="A job waits for all of its nodes.",
            fix="Look at the output of the command there: a node that cannot reach the first one says so.",
        )
    for number, stage in survey.lost.items():
        yield Finding(
            "PL983",
            survey.names[number],
            saw=f"it fell silent during {stage}.",
            rule="A job with this node would hang or fail.",
            fix="Look at its output and at its kernel's log; leave it out until it answers.",
        )


def _judge_names(survey: Survey) -> Iterator[Finding]:
    for kind, values in (("name", survey.names), ("address", survey.addresses)):
        for value, count in Counter(values).items():
            if count > 1:
                yield Finding(
                    "PL992",
                    "cluster",
                    saw=f"{count} nodes have the {kind} {value}.",
                    rule="Messages and schedulers name nodes by it, and gloo connects to it.",
                    fix=f"Give each node its own {kind}, and start the command once per node.",
                )
    for number, reply in survey.checked.items():
        own, why = reply.get("announced", ("", ""))
        address = survey.addresses[number]
        known = {found["code"] for each in reply.get("checked", ()) for found in each["findings"]}
        is_known = known & {"PL976", "PL977"}
        leads_nowhere = any(link[1] == number for link in survey.misled.keys() - survey.unreachable.keys())
        if not is_known and (leads_nowhere or (is_loopback(own or address) and not is_loopback(address))):
            yield Finding(
                "PL976",
                survey.names[number],
                saw=f"gloo would announce {own} there ({why}), and others reach it at {address}.",
                rule="torchrun's ranks would tell the others to connect there, which leads nowhere or to "
                "themselves. `paceline run` chooses the interface itself where no variable does.",
                fix=f"Write {address} beside the name in its /etc/hosts, or set GLOO_SOCKET_IFNAME to the "
                "interface that has it.",
            )


def _judge_reach(survey: Survey) -> Iterator[Finding]:
    failed: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for link, found in survey.unreachable.items():
        if survey.lost.keys() & link:
            continue  # it follows from the node's silence
        kind = "large" if found["stage"] == "large" else "silent"
        if "refused" in found["error"].lower() or "no route" in found["error"].lower():
            kind = "refused"
        failed[kind, found["error"]].append(link)
    for (kind, error), links in failed.items():
        what = (
            "answers small messages, but nothing larger arrives" if kind == "large" else "cannot be reached"
        )
        for way, where, (link, *_) in _group(survey, sorted(links)):
            text = _WAYS.get(way, f"from {survey.names[link[0]]}, {survey.names[link[1]]}")
            text += "" if way else f" ({survey.addresses[link[1]]})"
            yield Finding(
                "PL984",
                where,
                saw=f"{text} {what} ({error}).",
                rule="Every rank connects to every other, in both directions, before the first step.",
                fix=_ADVICE[kind],
            )


def _judge_links(survey: Survey) -> Iterator[Finding]:
    slow = find_slow_links(survey.rates)
    usual = find_usual_rate(survey.rates) if survey.rates else 0.0
    for way, where, numbers in _group(survey, slow):
        rates = [survey.rates[link] for link in numbers]
        where = f"all links {way} {where}" if way else where
        yield _describe_link(where, f"{_format_rate(max(rates))}, and {_format_rate(usual)} is usual here.")
    for link, share in survey.resent.items():
        if share > _RESENT and link not in slow:
            yield _describe_link(
                _name_link(survey, link), f"{share:.1%} of the packets had to be sent again."
            )
    if len(survey.rtts) > 2:
        usual_s = median(survey.rtts.values())
        far = [link for link, rtt in survey.rtts.items() if rtt > _FAR * usual_s and rtt > usual_s + _FAR_S]
        for way, where, numbers in _group(survey, [link for link in far if link not in slow]):
            rtt = format_seconds(max(survey.rtts[link] for link in numbers))
            where = f"all links {way} {where}" if way else where
            yield _describe_link(
                where, f"a round trip takes {rtt}, and {format_seconds(usual_s)} is usual here."
            )


def _group(survey: Survey, links: list[tuple[int, int]]) -> Iterator[tuple[str, str, list[tuple[int, int]]]]:
    """Yield a way of `_WAYS`, nodes and all of their links; then "", and each link that is left."""
    rest, others = list(links), len(survey.names) - 1
    if rest and len(rest) == others * len(survey.names):
        yield "between", join(survey.names), rest
        return
    for number, name in enumerate(survey.names):
        outgoing, incoming = ([link for link in rest if link[end] == number] for end in (0, 1))
        groups = [("from", outgoing), ("to", incoming)]
        if len(outgoing) == len(incoming) == others:
            groups = [("of", outgoing + incoming)]
        for way, own in groups:
            if others > 1 and len(own) >= others:
                yield way, name, own
                rest = [link for link in rest if link not in own]
    for link in rest:
        yield "", _name_link(survey, link), [link]


def _name_link(survey: Survey, link: tuple[int, int]) -> str:
    return f"{survey.names[link[0]]} to {survey.names[link[1]]}"


def _format_rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e6:,.0f} Mbit/s"


def _describe_link(where: str, saw: str) -> Finding:
    return Finding(
        "PL985",
        where,
        saw=saw,
        rule="The slowest link sets the pace of every collective that crosses it.",
        fix="Look at the cable, the port's speed and duplex, errors of the interface (ip -s link) and "
        "other traffic.",
    )


def _judge_speeds(survey: Survey) -> Iterator[Finding]:
    for node, kind, share in find_slow_nodes(survey.speeds):
        yield Finding(
            "PL986",
            survey.names[node],
            saw=f"{kind}: {share:.0%} of what is usual here.",
            rule="Ranks wait for the slowest node in every step.",
            fix="Look for other processes, a CPU quota, power saving and heat there; leave it out until "
            "then.",
        )


def _judge_clocks(survey: Survey) -> Iterator[Finding]:
    for node, found in survey.offsets_s.items():
        name, (offset_s, bound_s) = survey.names[node], found[0]
        if abs(offset_s) - bound_s > _CLOCK_S:
            yield _describe_clock(
                name, f"its clock is {offset_s:+.2f} s from {survey.names[0]}'s (known to {bound_s:.2g} s)."
            )
        if len(found) > 1 and survey.seconds_between_offsets:
            moved_s, unsure_s = found[-1][0] - offset_s, found[-1][1] + bound_s
            if abs(moved_s) - unsure_s > _DRIFT * survey.seconds_between_offsets + 0.05:
                yield _describe_clock(
                    name,
                    f"its clock moved by {moved_s:+.2f} s in {survey.seconds_between_offsets:.0f} s against "
                    f"{survey.names[0]}'s.",
                )


def _describe_clock(where: str, saw: str) -> Finding:
    return Finding(
        "PL975",
        where,
        saw,
        rule="Clocks that differ make logs that cannot be put in order, and tokens and certificates that "
        "are refused.",
        fix="Synchronise all nodes with one source: timedatectl set-ntp true, or chronyd.",
    )


def _judge_facts(survey: Survey) -> Iterator[Finding]:
    by_key: dict[str, dict[int, str]] = defaultdict(dict)
    for number, reply in survey.checked.items():
        for key, value in merge_facts(reply).items():
            by_key[key][number] = value
    for key, values in sorted(by_key.items()):
        shown = {number: values.get(number, "none") for number in survey.checked}
        counts = Counter(shown.values())
        if _OWN_FACT.fullmatch(key) or len(counts) < 2:
            continue
        usual = counts.most_common(1)[0][0]
        odd = {number: value for number, value in shown.items() if value != usual}
        listed = ", ".join(f"{survey.names[number]} has {value}" for number, value in odd.items())
        yield Finding(
            "PL988",
            join([survey.names[number] for number in odd]),
            saw=f"{key.removeprefix('$')}: {listed}; the others have {usual}.",
            rule="Ranks of one job must agree on code, versions and settings; where they don't, "
            "collectives differ or "
            "results do.",
            fix="Install or set the same on all nodes.",
        )


def merge_facts(reply: Mapping[str, Any]) -> dict[str, str]:
    """Return a node's values that should be the same everywhere."""
    facts: dict[str, str] = {}
    for checked in reply.get("checked", ()):
        facts |= checked["facts"]
    facts |= reply.get("facts", {})
    return facts


def _judge_folder(survey: Survey) -> Iterator[Finding]:
    if survey.without_folder:
        names = [survey.names[number] for number in survey.without_folder]
        yield Finding(
            "PL990",
            join(names),
            saw=f"{survey.folder} is not the folder that {survey.names[0]} sees under this name.",
            rule="A checkpoint that one node writes must be found by the others.",
            fix="Mount the common file system there, or leave --folder out: rank 0's disk alone may have "
            "whole checkpoints.",
        )


def _judge_collectives(survey: Survey) -> Iterator[Finding]:
    for number, wrong in survey.wrong.items():
        yield Finding(
            "PL989",
            survey.names[number],
            saw=f"{join(wrong)} gave wrong numbers.",
            rule="Each node sent numbers that all know, so the result is known too.",
            fix="Compare the versions of torch and gloo there, and test the node's memory; leave it out "
            "until then.",
        )
    if survey.failed_collectives:
        errors = {survey.names[number]: error for number, error in survey.failed_collectives.items()}
        where, error = next(iter(errors.items()))
        yield Finding(
            "PL989",
            join(list(errors)),
            saw=f"gloo's collectives failed; {where}: {error}.",
            rule="All nodes reach each other by plain connections, so the fault is in torch or its settings.",
            fix="Look at GLOO_SOCKET_IFNAME and at the versions of torch on the nodes.",
        )
    if survey.all_reduce_s and survey.rates and len(survey.names) > 1:
        size, seconds = max(survey.all_reduce_s.items())
        sent = 2 * (len(survey.names) - 1) / len(survey.names) * size / seconds
        slowest = min(min(rate, _FAST) for rate in survey.rates.values())
        if sent < _WEAK_ALL_REDUCE * slowest:
            yield Finding(
                "PL989",
                "cluster",
                saw=f"an all-reduce of {format_bytes(size)} takes {format_seconds(seconds)}: "
                f"{_format_rate(sent)} per "
                f"node, where the slowest link carries {_format_rate(slowest)}.",
                rule="A ring sends 2 (n - 1) / n of the bytes over each link.",
                fix="Look at which interface gloo uses (GLOO_SOCKET_IFNAME).",
            )
