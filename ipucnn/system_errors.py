"""What to do about an OSError, by its number: a full disk wants other advice than an absent folder."""

import errno

_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PERMISSION = (errno.EACCES, errno.EPERM, errno.EROFS)
_ABSENT = (errno.ENOENT, errno.ENOTDIR)


def reason_of(error: OSError) -> str:
    """Why, in the system's words and without the path."""
    return error.strerror or str(error) or type(error).__name__


def write_hint(error: OSError, elsewhere: str = "choose another folder") -> str:
    """What to do where something could not be written.

    Args:
        error: what the system said.
        elsewhere: how another place is chosen.
    """
    if error.errno in _SPACE:
        return f"free some space, or {elsewhere}"
    if error.errno in _PERMISSION:
        return f"make it writable, or {elsewhere}"
    if error.errno in _ABSENT:
        return f"make the folder it is in, or {elsewhere}"
    if error.errno == errno.ENAMETOOLONG:
        return "choose a shorter name"
    return elsewhere
