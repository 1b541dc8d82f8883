"""Agrees on the members of each round, without a place that the job depends on.

One launcher leads. The others hold a link to it, over which both sides beat. The leader forms the rounds:

1. Every launcher whose agent waits for a round sends an offer. When all members of the last world that are
   still there have offered, the leader proposes the next world: these members, and newcomers up to the
   maximum number of nodes.
2. Each proposed member accepts, and remembers the proposal. When all have accepted, the leader commits it.

If the leader is lost, the others ask each other. The first of them in the order of the last world leads, if
those that it reaches have a quorum (`world.has_quorum`) of the last world, and of each accepted world whose
fate is unknown. A member follows one leader at a time, and each new world needs a quorum of its followers, so
two parts of a world can never both go on. Every launcher has the whole state, so no single one matters.

A member is lost when its link ends, or when it has not beaten for `detect_s` by this machine's own clock.
It is known to be dead if its machine refuses a connection to its port soon after its link ended, if another
launcher listens there, or if it has announced that it leaves.

With a witness (`witness.py`), each world is recorded there before it is committed. If two parts go on from
the same world, the first to record wins. A part with a quorum records immediately. A part without one waits
first, and must have a member of the last world: the ranks of that world cannot train without it.

While nothing changes, the leader beats, and each follower answers at once. So a node wakes twice per second
for this, and the answers reach the leader together. A follower that hears no beat beats on its own.

This file does no input or output: `wire.py` carries its messages, and tests drive it with their own clock.
`rounds.py` forms and ends the rounds.
"""

from __future__ import annotations

import logging

from paceline.launching.members import reports
from paceline.launching.members.contacts import place_of
from paceline.launching.members.records import (
    Address,
    Lost,
    Message,
    Peer,
    Terms,
    read_answer,
    read_pending,
)
from paceline.launching.members.rounds import Rounds
from paceline.launching.members.witness import Entry
from paceline.launching.members.world import (
    Member,
    NodeWorld,
    world_from_json,
    world_to_json,
)

log = logging.getLogger(__name__)

_NEVER = float("-inf")
_CLOSED = "its connection was closed"
# A follower that the leader's beat does not wake beats after this many times the leader's interval.
_LATE_BEAT = 1.5


class Membership(Rounds):
    """One launcher as a member of its job: reacts to messages, timers and the witness."""

    # ---- called for the agent

    def want_round(self, offer: Message, now: float) -> None:
        """Wait for the next round, with the ports that this node offers if it becomes number 0."""
        self._offer, self._offered_s = offer, now
        if self.role == "following" and self._up is not None:
            self._links.send(self._up, {"kind": "offer", "offer": offer})
        elif self.role == "leading" and self._runs(self.me.key):
            self._end_round(f"the ranks of {self.me} failed")

    def finish(self) -> None:
        """Take note that this node's ranks have succeeded."""
        self._is_done = True
        if self.role == "following" and self._up is not None:
            self._links.send(self._up, {"kind": "done"})

    def close(self) -> None:
        """End the job for all nodes, because this one has failed."""
        if self.role == "following" and self._up is not None:
            self._links.send(self._up, {"kind": "close"})
        elif self.role == "leading":
            self._close(failed=True)
        self._is_closed = True

    def leave(self) -> None:
        """Leave the job; the others go on."""
        for link in self._followed_links():
            self._links.send(link, {"kind": "leave"})
        self._has_left = not self._is_closed
        self._is_closed = True

    # ---- events of the links

    def opened(self, link: int, now: float) -> None:
        """Send the first message on a link that this launcher opened."""
        self.rests_until_s = _NEVER
        if self._contacts.is_asked(link):
            self._links.send(link, {"kind": "ask", **self._describe()})
        elif link == self._up:
            words = {"offer": self._offer, "is_done": self._is_done}
            nodes = {"least": self.terms.least, "most": self.terms.most, "code": dict(self.terms.code)}
            nodes |= {"nproc": self.terms.nproc, "folder": self.terms.folder}
            self._links.send(link, {"kind": "join", **words, **nodes, **self._describe()})

    def received(self, link: int, message: Message, now: float) -> None:
        """Handle a message; what is not a message of this job ends the link."""
        if message.get("kind") != "beat":
            self.rests_until_s = _NEVER
        try:
            if link == self._up:
                self._up_heard_s = self._contact_s = now
                self._hear_leader(message["kind"], message, now)
            elif link in self._peers:
                self._peers[link].heard_s = now
                self._hear_follower(self._peers[link], message["kind"], message, now)
            else:
                self._hear_stranger(link, message["kind"], message, now)
        except (KeyError, TypeError, ValueError):
            self._links.close(link)
            self.ended(link, False, now)

    def ended(self, link: int, refused: bool, now: float) -> None:
        """Handle the end of a link; `refused` if no launcher listens at that port."""
        self.rests_until_s = _NEVER
        place = self._contacts.finish(link)
        if place is not None:
            if refused:
                self._note_refusal(place, now)
        elif link == self._up:
            self._lose_leader(_CLOSED, now)
        elif link in self._peers:
            self._lose(self._peers[link], _CLOSED, now)

    def tick(self, now: float) -> None:
        """Beat, find out who is lost, and take the next step to a round."""
        self.rests_until_s = _NEVER
        self._listen_for_silence(now)
        if now - self._beat_s >= self.waits.beat_s * (_LATE_BEAT if self.role == "following" else 1):
            self._beat(now)
        self._contacts.give_up_late(now)
        if self._is_closed:
            return
        is_idle = self.role != "following" and (self.world is None or self._is_over)
        is_firm = self.role == "following" or self._has_quorum(self._present())
        self._testimony.ask(now, is_idle=is_idle, is_firm=is_firm)
        if self.role == "seeking" and self._up is None:
            self._contacts.ask(self._known(), self.waits.beat_s / 2, now)
            self._find_leader(now)
        elif self.role == "leading":
            here = [place_of(peer.member) for peer in self._peers.values()]
            self._contacts.ask(self._known(), self.waits.beat_s, now, not_at=here)
            self._lead_on(now)
        self._give_up_late(now)
        self._rest(now)

    # ---- what it learns of others

    def _hear_stranger(self, link: int, kind: str, message: Message, now: float) -> None:
        if message.get("job") != self.terms.job:
            text = f"{self.me} serves the job {self.terms.job!r}"
            self._links.send(link, {"kind": "refuse", "text": text, "job": message.get("job")})
            self._links.close(link)
        elif kind == "status":
            self._links.send(link, {"kind": "status", **self._report(now)})
        elif kind == "join":
            self._admit(link, message, now)
        elif kind == "ask":
            self._learn(link, message, now)
            self._links.send(link, {"kind": "answer", **self._describe()})
        elif kind in ("answer", "refuse"):
            if kind == "answer":
                self._learn(link, message, now)
            else:
                self._refusals.add(str(message["text"]))
            place = self._contacts.finish(link)
            self._links.close(link)
            if kind == "refuse" and place is not None:
                self._note_refusal(place, now)  # its port belongs to a launcher of another job

    def _learn(self, link: int, message: Message, now: float) -> None:
        other = read_answer(message, now)
        self._contacts.take(link, other)
        if other.member.key == self.me.key:
            return
        self._dead |= other.dead
        if other.has_left:
            self._dead.add(other.member.key)  # only its last step may still go on
            return
        for member in self._known():
            if place_of(member) == place_of(other.member) and member.key != other.member.key:
                self._dead.add(member.key)  # another launcher has its port
        if other.is_closed:
            if self.world is not None and other.world is not None and self.role != "leading":
                self._close(failed=False)
            return
        self._adopt(other.world)
        if self.role == "leading" and other.role == "leading" and self._comes_after(other):
            self._step_down(f"{other.member} leads the job", now)

    def _adopt(self, world: NodeWorld | None) -> None:
        """Take over a committed world that is newer than the own one."""
        if world is None or (self.world is not None and world.round <= self.world.round):
            return
        was_running = self._runs(self.me.key) and not self._has_left
        self._withdraw()
        self.world, self._is_over = world, True
        self._pending = {b: w for b, w in self._pending.items() if w.round > world.round}
        if was_running:
            self._agent.over("other nodes have gone on without this one", lost=True)

    def _note_refusal(self, place: Address, now: float) -> None:
        """Take note that no launcher listens at an address any more, so its member is dead.

        This only holds for one that was there just before: after a partition, it may have finished the job.
        """
        for member in self._known():
            lost = self._lost.get(member.key)
            # A witness knows of the end of the job. A noted world has nothing else to go by.
            is_recent = now - self._contact_s <= 2 * self.waits.detect_s
            is_recent = is_recent or self._testimony.is_there or self._is_noted()
            if place_of(member) == place and is_recent and not (lost is not None and lost.is_silent):
                self._dead.add(member.key)

    # ---- the witness

    def heard_witness(self, last: Entry | None, launchers: list[Member], now: float) -> None:
        """Take note of the last entry, and of where other launchers are."""
        self._contacts.endpoints = [*self._endpoints, *map(place_of, launchers)]
        if self._is_closed or self.role == "following":
            return
        if not self._testimony.has_read:
            self._seeks_until_s = now + self.waits.probe_s  # to ask them who leads
        self._testimony.note(last)
        if last is None:
            return
        if not last.is_final:
            self._adopt(last.world)
        elif self.world is None:
            self._testimony.last_round = last.world.round
        else:
            self._close(failed=False)

    def recorded(self, last: Entry, now: float) -> None:
        """Commit the proposal if it is what was recorded; else follow what was."""
        proposal = self._proposal
        if proposal is not None and not proposal.missing and last.world == proposal.world:
            self._testimony.note(last)
            self._conclude(proposal)
            return
        self.heard_witness(last, [], now)
        if self._proposal is not None:
            self._proposal.is_recorded = False  # only the number was not the next one

    # ---- seeking

    def _find_leader(self, now: float) -> None:
        answers = self._contacts.fresh(now)
        leaders = [answer for answer in answers if answer.role == "leading"]
        if self.world is not None:
            # One without a world starts the job anew, so a launcher that knows a world does not follow it.
            leaders = [answer for answer in leaders if answer.world is not None]
        if leaders:
            best = max(leaders, key=lambda a: (0 if a.world is None else a.world.round, a.is_firm))
            # A leader without a quorum is followed only by launchers after it in the last world's order.
            if best.is_firm or not self._comes_before(best.member):
                self._leader, self._up_heard_s = best.member, now
                self._up = self._links.dial(*place_of(best.member))
            return
        if self.world is None:
            if self._founds and self._testimony.has_read and now >= self._seeks_until_s:
                self._lead(now)
            return
        seekers = [answer for answer in answers if answer.role == "seeking"]
        # A proposal that one of them has accepted may have been committed, so its world needs a quorum too.
        for answer in seekers:
            self._pending |= {b: w for b, w in answer.pending.items() if w.round > self.world.round}
        reached = {self.me.key, *(answer.member.key for answer in seekers)}
        is_first = self._begins() or all(self._comes_before(answer.member) for answer in seekers)
        if is_first and self._may_decide(reached, now) and now >= self._seeks_until_s:
            self._lead(now)

    def _lead(self, now: float) -> None:
        self.role, self._leader = "leading", self.me
        self._peers, self._weak_since_s = {}, None
        self._arrived_s = self._led_since_s = now

    # ---- following

    def _hear_leader(self, kind: str, message: Message, now: float) -> None:
        up, leader = self._up, self._leader
        if up is None or leader is None:
            return
        if kind == "joined":
            self.role, self._lost, self._refusals = "following", {}, set()
            self._adopt(world_from_json(message["world"]))
            # These may have changed since this launcher asked to join.
            if self._offer is not None:
                self._links.send(up, {"kind": "offer", "offer": self._offer})
            if self._is_done:
                self._links.send(up, {"kind": "done"})
        elif kind == "beat":
            if message["is_running"]:
                self._offered_s = now  # a spare waits for as long as the others train
            self._beat(now)
            if self.rests_until_s > now:
                self._rest(now)
        elif kind == "over":
            self._is_over = True
            self._agent.over(message["reason"], lost=bool(message["lost"]))
        elif kind == "propose":
            world = world_from_json(message["world"])
            if world is None:
                raise ValueError("no world")
            self._ballot = max(self._ballot, int(message["ballot"]))
            # A leader has one proposal at a time: it has withdrawn the one before, and commits it no more.
            self._pending = {b: w for b, w in self._pending.items() if b[1] != leader.key}
            self._pending[int(message["ballot"]), leader.key] = world
            self._links.send(up, {"kind": "accept", "ballot": message["ballot"]})
        elif kind == "commit":
            self._commit(self._pending[int(message["ballot"]), leader.key])
        elif kind == "note":
            self._adopt(world_from_json(message["world"]))
        elif kind == "closed":
            self._close(failed=bool(message["failed"]))
        elif kind == "leave":
            self._dead.add(leader.key)
            self._lose_leader("it was asked to leave", now, left=True)
        elif kind in ("answer", "refuse"):  # it does not lead any more, or not this job
            if kind == "answer":
                self._learn(up, message, now)
            else:
                self._refusals.add(str(message["text"]))
            self._drop_leader()

    def _lose_leader(self, why: str, now: float, *, left: bool = False, is_silent: bool = False) -> None:
        leader, was_following = self._leader, self.role == "following"
        self._drop_leader()
        if leader is None or not was_following or self._is_closed:
            return
        self._lost[leader.key] = Lost(leader, why, now, is_silent)
        if is_silent:
            # The others may go on without this node. A port that refuses later proves nothing then, see
            # `_note_refusal`; for the wait, see `_lose`.
            self._contact_s = _NEVER
            self._not_before_s = now + 2 * self.waits.beat_s
        was_running, self._is_over = self._runs(self.me.key), True
        if was_running:
            self._agent.over(f"{leader} {'left' if left else 'is lost'}: {why}", lost=not left)

    # ---- leading

    def _admit(self, link: int, message: Message, now: float) -> None:
        self._learn(link, message, now)
        if self.role != "leading" or self._is_closed:
            self._links.send(link, {"kind": "answer", **self._describe()})
            self._links.close(link)
            return
        member = Member(**message["member"])
        theirs = Terms(self.terms.job, int(message["least"]), int(message["most"]), dict(message["code"]))
        if text := reports.compare_terms(str(self.me), self.terms, theirs):
            self._links.send(link, {"kind": "refuse", "text": text, "job": self.terms.job})
            self._links.close(link)
            why = text.replace("this node", "it")
            if (told := f"{member}: {why}") not in self._refused:
                self._refused.add(told)
                log.warning("%s was refused: %s", member, why)
            return
        if self.terms.nproc != (nproc := int(message.get("nproc", self.terms.nproc))):
            log.warning(
                "%s starts %d rank%s and this node %d (--nproc-per-node): the layout must fit their sum",
                *(member, nproc, "" if nproc == 1 else "s", self.terms.nproc),
            )
        if self.terms.folder != message.get("folder", self.terms.folder):
            log.warning(
                "%s has a working folder of its own: what a script saves there is lost with that node. "
                "Ranks that find no file of a run that has saved must fail, and not begin anew (docs/run.md)",
                member,
            )
        for peer in list(self._peers.values()):
            if peer.member.key == member.key:
                self._links.close(peer.link)
                self._lose(peer, "it connected again", now)
        self._links.send(link, {"kind": "joined", "world": world_to_json(self.world)})
        self._peers[link] = Peer(member, link, now, message["offer"], bool(message["is_done"]))
        self._lost.pop(member.key, None)
        self._arrived_s = now
        if self._runs(member.key) and not message["is_done"]:
            self._end_round(f"{member} connected again")
        last = 0 if self.world is None else self.world.round
        self._pending |= {b: w for b, w in read_pending(message["pending"]).items() if w.round > last}

    def _hear_follower(self, peer: Peer, kind: str, message: Message, now: float) -> None:
        if kind == "beat":
            peer.beats = int(message["n"])
        elif kind == "offer":
            peer.offer = message["offer"]
            if self._runs(peer.member.key):
                self._end_round(f"the ranks of {peer.member} failed")
        elif kind == "accept":
            proposal = self._proposal
            if proposal is not None and proposal.ballot[0] == message["ballot"]:
                proposal.missing.discard(peer.member.key)
        elif kind == "done":
            peer.is_done = True
        elif kind == "close":
            self._close(failed=True)
        elif kind == "leave":
            self._dead.add(peer.member.key)
            self._links.close(peer.link)
            self._lose(peer, "it was asked to leave", now, left=True)
        if kind != "beat" and not self._is_closed and self.role == "leading":
            self._lead_on(now)

    def _lose(self, peer: Peer, why: str, now: float, *, left: bool = False, is_silent: bool = False) -> None:
        self._peers.pop(peer.link, None)
        self._lost[peer.member.key] = Lost(peer.member, why, now, is_silent)
        proposal = self._proposal
        if proposal is not None and (
            peer.member.key in proposal.missing or proposal.world.find(peer.member.key) >= 0
        ):
            self._withdraw()
        if is_silent:
            # By then the other side has ended its ranks too, and nothing of this round is still written.
            self._not_before_s = now + 2 * self.waits.beat_s
        if self._runs(peer.member.key) and not (peer.is_done or self._is_closed):
            self._end_round(f"{peer.member} {'left' if left else 'is lost'}: {why}", lost=not left)

    # ---- both

    def _beat(self, now: float) -> None:
        self._beat_s = now
        self._beats += 1
        is_running = self.world is not None and not self._is_over
        beat = {"kind": "beat", "n": self._beats, "is_running": is_running}
        self._links.send_all(self._followed_links(), beat)

    def _rest(self, now: float) -> None:
        """Note until when there is nothing to do if no news comes: while a round runs with all its nodes."""
        if self.world is None or self._is_over or self._offer is not None:
            return
        if self.role == "following":
            self.rests_until_s = min(
                self._beat_s + _LATE_BEAT * self.waits.beat_s, self._up_heard_s + self.waits.detect_s
            )
        elif self.role == "leading" and self._is_whole(self.world):
            heard_s = min((peer.heard_s for peer in self._peers.values()), default=now)
            self.rests_until_s = min(self._beat_s + self.waits.beat_s, heard_s + self.waits.detect_s)

    def _is_whole(self, world: NodeWorld) -> bool:
        """Return whether all members of the running round are there, and nobody else can join it."""
        present = self._present()
        has_room = len(world.members) < self.terms.most and len(present) > len(world.members)
        return not has_room and all(member.key in present for member in world.members)

    def _listen_for_silence(self, now: float) -> None:
        why = f"no beat for {self.waits.detect_s:g} s"
        if self._up is not None and now - self._up_heard_s > self.waits.detect_s:
            self._lose_leader(why, now, is_silent=True)
        for peer in list(self._peers.values()):
            if now - peer.heard_s > self.waits.detect_s:
                self._links.close(peer.link)
                self._lose(peer, why, now, is_silent=True)

    def _give_up_late(self, now: float) -> None:
        """Stop waiting for a round that has not come in time, with the reason."""
        error = self._explain_lateness(now)
        if error is not None:
            self._agent.failed(error)
