"""Names what this process does in a pipeline at the moment, for the verdict on a hang.

The rank that runs a schedule sets these names, and the thread that watches it reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.pipeline.messages import Message
from paceline.pipeline.schedule import Action


@dataclass
class UnderWay:
    """The work of a rank at the moment.

    Attributes:
        action: that runs, or that waits for what it needs.
        posted: the message whose send or receive is being called.
        awaited: the message for which the rank waits.
    """

    action: Action | None = None
    posted: Message | None = None
    awaited: Message | None = None


UNDER_WAY = UnderWay()
