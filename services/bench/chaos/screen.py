"""`signalbox demo kill`: a small campaign to watch. Answers grow on the screen while processes die under them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from services.bench.chaos.campaign import Campaign, Options, run
from services.bench.chaos.clients import Stream
from services.bench.chaos.members import Member
from services.bench.chaos.report import table
from services.models import store

REFRESH = 0.1  # seconds between two looks at the engine
QUIET = 0.5  # seconds without a token after which an answer is shown as paused
FAULTS_SHOWN = 5
LINES = 4  # of each answer


class Screen:
    """What the campaign is doing. It takes the place of a Progress."""

    def __init__(self, show: Callable[[Group], None]) -> None:
        self._show = show
        self._text = ""

    def update(self, text: str) -> None:
        """Say what is going on now."""
        self._text = text

    async def watch(self, campaign: Campaign) -> None:
        """Until cancelled."""
        while True:
            self.draw(campaign)
            await asyncio.sleep(REFRESH)

    def draw(self, campaign: Campaign) -> None:
        """Processes, the last faults and the answers under way."""
        now = time.monotonic()
        processes = Table(box=None, show_header=False)
        for member in campaign.cast.members:
            processes.add_row(str(member), _state(member), f"{member.deaths} deaths" if member.deaths else "")
        done = campaign.faults.done[-FAULTS_SHOWN:]
        faults = Text("\n".join(f"{now - fault.at:4.1f} s ago: {fault.kind} of {fault.victim}" for fault in done))
        above = Table.grid(expand=True)
        above.add_column(ratio=1)
        above.add_column(ratio=1)
        above.add_row(Panel(processes, title="processes"), Panel(faults, title="faults"))
        self._show(Group(above, *(_answer(stream, now) for stream in list(campaign.open)), Text(self._text)))


def _state(member: Member) -> Text:
    if not member.runs:
        return Text("dead", style="bold red")
    found = member.status()
    if found is not None and found.pid == member.pid and found.ready:
        return Text(f"serves, process {member.pid}", style="green")
    return Text("starting", style="yellow")


def _answer(stream: Stream, now: float) -> Panel:
    width = 2 * LINES * 40
    quiet = now - (stream.times[-1] if stream.times else stream.began)
    style = "yellow" if quiet > QUIET else "default"
    title = f"frontend {stream.frontend}, {len(stream.tokens)} of {stream.request.max_tokens} tokens"
    if quiet > QUIET:
        title += f", waits since {quiet:.1f} s"
    return Panel(Text(stream.text[-width:].replace("\n", " ")), title=title, border_style=style, height=LINES + 2)


def main(options: Options) -> int:
    """The command: exit code 1 when a stream did not end with its undisturbed tokens."""
    store.resolve(options.model)  # a name that is wrong is told before anything else
    console = Console()
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        screen = Screen(lambda group: live.update(group, refresh=True))
        report, folder = asyncio.run(run(options, screen, watch=screen.watch))
    console.print(table(report))
    for what in report.broken():
        console.out(f"broken: {what}; the logs are in {folder}", highlight=False)
    return 1 if report.broken() else 0
