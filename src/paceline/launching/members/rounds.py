"""Forms, ends and closes the rounds of a job, as its leader; `membership.py` has the protocol."""

from __future__ import annotations

from paceline.launching.members.choice import choose_peers, has_finished
from paceline.launching.members.knowledge import Knowledge
from paceline.launching.members.records import Peer, Proposal
from paceline.launching.members.world import NodeWorld, world_to_json


class Rounds(Knowledge):
    """The rounds of one launcher's job: what it does about them once it leads, and how it stops leading."""

    def _lead_on(self, now: float) -> None:
        """Form the next round if everything for it is there."""
        if self._proposal is not None:
            if not self._proposal.missing:
                self._commit_proposal(self._proposal)
            return
        if not self._may_decide(self._present(), now):
            # Others may form a world without this part. Followers get two beats to connect (again).
            if self._weak_since_s is None:
                self._weak_since_s = now
            elif now - self._weak_since_s > 2 * self.waits.beat_s:
                self._step_down("this node is cut off from the others", now)
            return
        self._weak_since_s, self._contact_s = None, now
        here = [Peer(self.me, 0, now, self._offer, self._is_done), *self._peers.values()]
        if self.world is not None and has_finished(self.world, here):
            self._close(failed=False)
        elif self.world is not None and not self._is_over:
            self._let_in(self.world, now)
        else:
            self._propose(choose_peers(self.world, here, self.terms.most), now)

    def _let_in(self, world: NodeWorld, now: float) -> None:
        """End a round for newcomers if there is room; several that come together join at once."""
        room = self.terms.most - len(world.members)
        new = [p.member for p in self._peers.values() if p.offer is not None and world.find(p.member.key) < 0]
        if new and room > 0 and now >= self._arrived_s + 2 * self.waits.beat_s:
            names = ", ".join(map(str, new[:room]))
            self._end_round(f"{names} {'joins' if len(new[:room]) == 1 else 'join'}")

    def _propose(self, chosen: list[Peer] | None, now: float) -> None:
        """Propose the next world, unless it is too early for it."""
        if not chosen or len(chosen) < self.terms.least or now < self._not_before_s:
            return
        # A new leader gives the others of the last world the time to find it.
        gone = self._present() | self._dead | self._lost.keys()
        is_new = now < self._led_since_s + self.waits.probe_s
        if is_new and self.world is not None and any(m.key not in gone for m in self.world.members):
            return
        is_first = self.world is None or self._is_noted()
        if is_first and len(chosen) < self.terms.most:
            # A launcher that starts a new job also waits, so that launchers that know of the job can ask it
            # first.
            last_call_s = self._arrived_s + self.waits.first_call_s
            if now < max(last_call_s, self._began_s + 3 * self.waits.beat_s):
                return
        rounds = [world.round for world in [self.world, *self._pending.values()] if world is not None]
        rounds.append(self._testimony.last_round)
        offer = chosen[0].offer or {}
        ports = int(offer["store_port"]), int(offer["master_port"])
        world = NodeWorld(max(rounds, default=0) + 1, tuple(peer.member for peer in chosen), *ports)
        self._ballot = max([self._ballot, *(number for number, _ in self._pending)]) + 1
        ballot = self._ballot, self.me.key
        self._pending = {b: w for b, w in self._pending.items() if b[1] != self.me.key} | {ballot: world}
        self._proposal = Proposal(ballot, world)
        # Who counts for the quorum accepts too, so that it does not also count for another leader's.
        counts = {member.key for member in (*world.members, *self._known())}
        for peer in self._peers.values():
            if peer.member.key in counts:
                self._proposal.missing.add(peer.member.key)
                words = {"ballot": ballot[0], "world": world_to_json(world)}
                self._links.send(peer.link, {"kind": "propose", **words})

    def _commit_proposal(self, proposal: Proposal) -> None:
        if not self._testimony.is_there:
            self._conclude(proposal)
        elif not proposal.is_recorded:
            proposal.is_recorded = True
            self._testimony.append(proposal.world)

    def _conclude(self, proposal: Proposal) -> None:
        self._proposal = None
        for peer in self._peers.values():
            if proposal.world.find(peer.member.key) >= 0:
                peer.offer = None
                self._links.send(peer.link, {"kind": "commit", "ballot": proposal.ballot[0]})
            else:
                self._links.send(peer.link, {"kind": "note", "world": world_to_json(proposal.world)})
        self._commit(proposal.world)

    def _commit(self, world: NodeWorld) -> None:
        self.world, self._pending, self._is_over = world, {}, False
        if world.find(self.me.key) >= 0:
            self._offer = None
            self._agent.formed(world)

    def _end_round(self, reason: str, *, lost: bool = False) -> None:
        self._is_over = True
        self._links.send_all(self._peers, {"kind": "over", "reason": reason, "lost": lost})
        self._agent.over(reason, lost=lost)

    def _withdraw(self) -> None:
        """Withdraw the proposal. Only this launcher could commit it, so it has no effect."""
        if self._proposal is not None:
            self._pending.pop(self._proposal.ballot, None)
            self._proposal = None

    def _step_down(self, reason: str, now: float) -> None:
        self._seeks_until_s = now + self.waits.probe_s
        for link in self._peers:
            self._links.close(link)
        self._withdraw()
        self._peers = {}
        # The ranks must not go on: another part of the world may already train without them. Those of a node
        # that leaves save, and end by themselves.
        was_running, self._is_over = self._runs(self.me.key) and not self._has_left, True
        if was_running:
            self._agent.over(reason, lost=True)
        self._drop_leader()

    def _drop_leader(self) -> None:
        if self._up is not None:
            self._links.close(self._up)
        self.role, self._up, self._leader = "seeking", None, None
        self._contacts.answers.clear()

    def _close(self, *, failed: bool) -> None:
        if not self._is_closed:
            self._links.send_all(self._peers, {"kind": "closed", "failed": failed})
            if self.role == "leading" and self.world is not None:
                self._testimony.append(self.world, is_final=True)
            self._is_closed = True
            self._agent.closed(failed=failed)
