"""The history files of PostgreSQL's timelines, as TIMELINE_HISTORY gives them. Pure.

Source: PostgreSQL documentation 54.4 TIMELINE_HISTORY; src/backend/access/transam/timeline.c.
"""

from schemas.lsn import parse_lsn


def switch_points(history: str) -> dict[int, int]:
    """Parse a history: each ancestor of its timeline -> the LSN at which that was left, in bytes.

    A line is a timeline, a tab, an LSN, a tab and a reason. Other lines are comments.
    """
    lines = (line.split("\t") for line in history.splitlines())
    return {
        int(fields[0]): parse_lsn(fields[1].strip())
        for fields in lines
        if len(fields) > 1 and fields[0].strip().isdigit()
    }
