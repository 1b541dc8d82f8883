"""Decides how the sequence of a model is divided by gather: attention by rows, from a trial forward.

Everything between the blocks runs on rows, and so does attention. Its keys and values are exchanged in calls
of torch's `scaled_dot_product_attention`, which is also where the rows of a mask are cut. Other tensors that
meet rows position by position (the cosines and sines of rotary positions) are cut where they enter a block.
No head is divided, so `cp` may be larger than the number of key and value heads.
"""

from __future__ import annotations

from paceline.errors import PacelineError
from paceline.parallel.context.context_plan import Attending, Entering
from paceline.parallel.context.gather import POSITIONS, AttentionCall, outside_attention_error
from paceline.parallel.context.refusals import cannot_divide_error
from paceline.parallel.context.walk import Walk
from paceline.parallel.tensor.atoms import Dim, leaves
from paceline.parallel.tensor.trace import Written


class GatherWalk(Walk):
    """A walk that follows rows through attention; see `Walk`."""

    def _walk_stretch(self, index: int, first: int, last: int, stream: int) -> None:
        self.streams[index] = stream
        attended = {call.first: call for call in self.trace.attended if first <= call.first < last}
        entering = self._find_entering(index, first, last, stream, attended)
        self.rows[stream] = index
        self.rows.update(dict.fromkeys(entering, index))
        number = first
        while number < last:
            behind = self.pass_whole(index, number, last)
            if behind is not None:
                number = behind
                continue
            call = attended.get(number)
            inside = range(number, number + 1 if call is None else call.last)
            self.stretch_at.update(dict.fromkeys(inside, index))
            if call is None:
                self._pass_op(index, number)
            else:
                self._attend(index, call)
            number = max(inside.stop, number + 1)
        for tensor in entering:  # whole again for the next stretch
            self.rows.pop(tensor)

    def _pass_op(self, index: int, number: int) -> None:
        op = self.trace.ops[number]
        if self._combines(op) and any(tensor in self.rows for tensor in op.inputs):
            raise outside_attention_error(f"{op.name} in {op.module or 'the model'}")
        super()._pass_op(index, number)

    def _attend(self, index: int, call: Written) -> None:
        """Follow rows through a call of attention."""
        given = AttentionCall(*call.taken, **call.named)
        where = f"the attention in {call.module or 'the model'}"
        divided = [tensor in self.rows for tensor in given[:3]]
        inside = range(call.first, call.last)
        if not any(divided):
            for number in inside:
                super()._pass_op(index, number)
            return
        if not divided[0] or divided[1] != divided[2]:
            raise cannot_divide_error(f"{where} has some positions of its keys and all of its queries")
        for tensor in [tensor for tensor, rows in zip(given[:3], divided, strict=True) if rows]:
            place = len(self.trace.shapes[tensor]) + POSITIONS
            if self.rows[tensor] != index or self.find_rows(tensor, self.sequence(index)) != (place, 1):
                raise cannot_divide_error(
                    f"{where} does not have its positions in the last dimension but one"
                )
        mask = given.attn_mask
        if mask is not None and (mask in self.rows or self._uses.learned.get(mask)):
            what = "is computed from some positions" if mask in self.rows else "depends on parameters"
            raise cannot_divide_error(
                f"the mask of {where} {what}", fix='Set cp_by="heads", with which any mask works.'
            )
        if not divided[1]:
            self._attend_to_whole(index, call, set(given[1:3]))
        self._part_ops.update(inside)
        self.rows.update(dict.fromkeys(call.outputs, index))
        is_causal = AttentionCall(*call.args, **call.kwargs).is_causal is True
        self.plan.attending.append(Attending(call.module, call.spot, index, divided[1], is_causal))
        made = {tensor for number in inside for tensor in self.trace.ops[number].outputs}
        for key, tensor in self.trace.drawn.items():
            if tensor in made:  # the weights [.., queries, keys]
                self.plan.draws[key] = (index, len(self.trace.shapes[tensor]) + POSITIONS)

    def _attend_to_whole(self, index: int, call: Written, keys: set[int]) -> None:
        """Plan an attention to another sequence, which each rank has whole; each gets a part of its gradient.

        So does what the block computes from that sequence for this attention alone.
        """
        block = next(block for block in self._stretches[index] if block.first <= call.first < block.last)
        made_by = {
            tensor: at for at in range(block.first, call.first) for tensor in self.trace.ops[at].outputs
        }
        ops, waiting, arguments = set[int](), list(keys), set[int]()
        while waiting:
            tensor = waiting.pop()
            if tensor not in self._uses.computed:
                continue
            if tensor not in made_by and not self._uses.learned.get(tensor):
                continue
            if tensor in block.tensors.values():
                arguments.add(tensor)
            elif tensor in made_by:
                ops.add(made_by[tensor])
                waiting += self.trace.ops[made_by[tensor]].inputs
            else:
                raise self._no_argument(call)
        made = {tensor for at in ops for tensor in self.trace.ops[at].outputs}
        others = set(range(block.first, block.last)) - ops - set(range(call.first, call.last))
        for tensor in made | arguments:
            if tensor in self._uses.computed and others.intersection(self._uses.of[tensor]):
                raise self._no_argument(call)
        for at in ops:
            self._add_partial(range(at, at + 1))
        self._part_ops |= ops
        for path, tensor in block.tensors.items():
            if tensor in arguments:
                self.plan.entering.append(Entering(block.module, path, None, index))

    def _no_argument(self, call: Written) -> PacelineError:
        return cannot_divide_error(
            f"the attention in {call.module or 'the model'} is to another sequence, which the block uses "
            "elsewhere too or does not get as an argument",
            fix='Set cp_by="heads", which divides its heads.',
        )

    # ---- tensors that enter blocks besides the stream

    def _find_entering(
        self, index: int, first: int, last: int, stream: int, attended: dict[int, Written]
    ) -> set[int]:
        """Return the arguments of blocks that meet rows position by position, and plan their cuts."""
        found: set[int] = set()
        while True:
            more = self._find_met(index, first, last, {stream, *found}, attended) - found
            if not more:
                break
            found |= more
        wanted = self.sequence(index)
        for call in self._stretches[index]:
            for path, tensor in call.tensors.items():
                if tensor in found:
                    dim, outer = self.find_rows(tensor, wanted)
                    if outer > 1 or self._uses.learned.get(tensor):
                        raise cannot_divide_error(
                            f"{call.module} gets a tensor besides the stream that depends on parameters, or "
                            "in which positions share a dimension",
                            fix='Set cp_by="heads", which leaves it whole.',
                        )
                    self.plan.entering.append(Entering(call.module, path, dim, index))
        return found

    def _find_met(
        self, index: int, first: int, last: int, start: set[int], attended: dict[int, Written]
    ) -> set[int]:
        """Return the blocks' arguments whose rows are needed, if `start` are the rows."""
        rows, found, wanted = set(start), set[int](), self.sequence(index)
        arguments = {tensor for call in self._stretches[index] for tensor in call.tensors.values()}
        made_by = {tensor: at for at in range(first, last) for tensor in self.trace.ops[at].outputs}
        number = first
        while number < last:
            whole = self.whole.by_first.get(number)
            if whole is not None:
                if any(tensor in rows for tensor in whole.tensors.values()):
                    given = self.whole.list_given(whole, last, rows, self.list_ends(index))
                    rows.update(tensor for _, tensor in given)
                number = whole.last
                continue
            call = attended.get(number)
            if call is not None:
                if any(tensor in rows for tensor in (*call.taken[:1], call.named.get("query"))):
                    rows.update(call.outputs)
                number = max(call.last, number + 1)
                continue
            op = self.trace.ops[number]
            if any(tensor in rows for tensor in op.inputs):
                rows.update(op.outputs)
                for tensor in op.inputs:
                    if tensor not in rows:
                        found |= self._trace_back(tensor, wanted, arguments, made_by)
            number += 1
        return found

    def _trace_back(self, tensor: int, wanted: Dim, arguments: set[int], made_by: dict[int, int]) -> set[int]:
        """Return the arguments of blocks from which a whole tensor with a dimension of positions is made."""
        found, seen, waiting = set[int](), set[int](), [tensor]
        while waiting:
            source = waiting.pop()
            if source in seen or not self._has_positions(source, wanted):
                continue
            seen.add(source)
            if source in arguments:
                found.add(source)
            elif source in made_by:  # of others, the rehearsal reports the length
                waiting += self.trace.ops[made_by[source]].inputs
        return found

    def _has_positions(self, tensor: int, wanted: Dim) -> bool:
        dims = [leaves(dim) for dim in self.dims[tensor]]
        size = len(wanted)
        return any(found[at : at + size] == wanted for found in dims for at in range(len(found) - size + 1))
