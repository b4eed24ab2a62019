"""What check.py may say about a folder: a code for each finding, and how serious it is."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

RECORD, OPEN = TRACKS = ("track_10min_16mb", "track_non_record_16mb")
NOTE, WARNED, REFUSED = LEVELS = ("note", "warned", "refused")


class Code(NamedTuple):
    """The level of a finding in either track (None: no rule there), and what it means."""

    record: str
    other: str | None
    meaning: str

    def level(self, track: str) -> str | None:
        return self.record if track == RECORD else self.other


# One code, one level for each track: nothing else decides how serious a finding is.
CODES = {
    # files and place
    "R101": Code(REFUSED, REFUSED, "the path is no record's folder"),
    "R102": Code(REFUSED, REFUSED, "README.md, submission.json, train_gpt.py or a log is missing"),
    "R103": Code(WARNED, WARNED, "a file has another name than it should"),
    "R104": Code(REFUSED, REFUSED, "a link leads out of the folder"),
    "R105": Code(WARNED, WARNED, "weights or data lie in the folder"),
    "R106": Code(WARNED, WARNED, "a run in the folder left its logs/"),
    "R107": Code(WARNED, WARNED, "README.md says nothing, or still has a TODO"),
    "R108": Code(WARNED, WARNED, "a part of the folder was not looked at"),
    "R109": Code(NOTE, NOTE, "files that the check does not know: not counted, not judged"),
    "R110": Code(WARNED, WARNED, "the folder lies in another track than submission.json says"),
    "R111": Code(WARNED, WARNED, "the folder is not called YYYY-MM-DD_Description"),
    # submission.json
    "R201": Code(REFUSED, REFUSED, "submission.json cannot be read"),
    "R202": Code(WARNED, WARNED, "submission.json lacks a required key"),
    "R203": Code(WARNED, WARNED, "a value of submission.json is of the wrong kind"),
    "R204": Code(WARNED, WARNED, "a value of submission.json is a placeholder"),
    "R205": Code(NOTE, NOTE, "a key of submission.json has another usual name"),
    # runs
    "R301": Code(NOTE, NOTE, "which runs are submitted, where the folder has others"),
    "R302": Code(NOTE, NOTE, "two log files have the same bytes"),
    "R303": Code(WARNED, WARNED, "a log's name and its run have different seeds"),
    "R304": Code(WARNED, WARNED, "one seed is in several runs"),
    "R305": Code(WARNED, NOTE, "fewer than three runs"),
    "R306": Code(WARNED, WARNED, "the logs and submission.json name different seeds"),
    "R307": Code(WARNED, WARNED, "the submitted runs differ in configuration"),
    "R308": Code(WARNED, WARNED, "a log without a finished run"),
    "R309": Code(REFUSED, REFUSED, "no log has a finished run"),
    "R310": Code(REFUSED, WARNED, "a submitted run was resumed"),
    "R311": Code(WARNED, WARNED, "two runs of different seeds took the same times to the digit"),
    "R312": Code(NOTE, NOTE, "a log in a subfolder without a finished run"),
    # score
    "R401": Code(REFUSED, REFUSED, "the stated result is better than every log says"),
    "R402": Code(WARNED, WARNED, "the stated result is in no log, and worse"),
    "R403": Code(WARNED, WARNED, "the stated result is another one of the logs"),
    "R404": Code(REFUSED, WARNED, "the stated result is the one before quantisation"),
    "R405": Code(NOTE, NOTE, "the stated result differs from the logs in its last digits"),
    "R406": Code(NOTE, NOTE, "the logs do not say this result"),
    "R407": Code(WARNED, WARNED, "a value of seed_results is not in the log of its seed"),
    "R408": Code(WARNED, WARNED, "the logs end with the stated result in words unknown here"),
    "R409": Code(NOTE, NOTE, "the stated result is not the last one of its logs"),
    "R410": Code(REFUSED, WARNED, "the submitted result is a validation while training"),
    # size
    "R501": Code(REFUSED, REFUSED, "code and model are larger than 16,000,000 bytes"),
    "R502": Code(WARNED, WARNED, "code and model are larger than the cap, or may be, as shipped"),
    "R503": Code(WARNED, WARNED, "no log says how large the compressed model is"),
    "R504": Code(WARNED, WARNED, "bytes_total is not the code and the model"),
    "R505": Code(WARNED, WARNED, "bytes_code is not the script's size"),
    "R506": Code(WARNED, WARNED, "the sizes in a log do not add up"),
    "R507": Code(WARNED, WARNED, "the script needs code beside it, which is counted"),
    "R508": Code(NOTE, NOTE, "the script may need code beside it, which is counted"),
    "R509": Code(WARNED, WARNED, "the script reads a file beside it, which is not counted"),
    "R510": Code(NOTE, NOTE, "bytes_total is the mean of the seeds, not the largest"),
    # script
    "R601": Code(REFUSED, WARNED, "all submitted logs hold another script"),
    "R602": Code(WARNED, WARNED, "a log holds another script"),
    "R603": Code(NOTE, NOTE, "a log does not hold its script"),
    "R604": Code(WARNED, WARNED, "a log counts a script of another size"),
    "R605": Code(REFUSED, REFUSED, "the script is empty or cannot be read"),
    "R606": Code(NOTE, NOTE, "the script is packed"),
    "R607": Code(WARNED, WARNED, "the script is packed in an unknown way, or not as it says"),
    "R608": Code(WARNED, WARNED, "the script is not Python"),
    "R609": Code(NOTE, NOTE, "this Python cannot read the script"),
    "R610": Code(WARNED, WARNED, "the script needs a package that nothing names"),
    "R611": Code(WARNED, WARNED, "the script downloads something"),
    "R612": Code(NOTE, NOTE, "the script imports what reaches a network or runs machine code"),
    "R613": Code(WARNED, WARNED, "validation data is among the files to train on"),
    # time and machine
    "R701": Code(REFUSED, None, "it trained for more than 600 seconds"),
    "R702": Code(REFUSED, None, "the submitted evaluation took more than 600 seconds"),
    "R703": Code(WARNED, WARNED, "the times in a log contradict each other"),
    "R704": Code(NOTE, None, "a log does not say how long it trained"),
    "R705": Code(REFUSED, None, "it did not run on 8 H100s"),
    "R706": Code(NOTE, None, "a log does not name the GPU"),
    # data
    "R801": Code(REFUSED, REFUSED, "a part of the validation split was scored"),
    "R802": Code(REFUSED, WARNED, "val_loss and val_bpb imply wrong bytes of the split"),
    "R803": Code(WARNED, WARNED, "val_loss and val_bpb imply slightly other bytes of the split"),
    "R804": Code(NOTE, NOTE, "the bytes of the split were not checked"),
    "R805": Code(WARNED, WARNED, "val_loss and val_bpb of the result are not of one evaluation"),
    # significance
    "R901": Code(NOTE, NOTE, "better than the previous record, at p < 0.01"),
    "R902": Code(REFUSED, NOTE, "not shown to be better than the previous record"),
    "R903": Code(WARNED, WARNED, "cannot be compared with the previous record"),
    "R904": Code(NOTE, NOTE, "how it was compared with the previous record"),
    # the checker itself
    "R999": Code(WARNED, WARNED, "the check itself failed: please report it"),
}


@dataclass(frozen=True)
class Finding:
    """What a rule has to say, about `logs` or the folder."""

    code: str  # one of CODES
    message: str
    logs: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        more = f" and {len(self.logs) - 1} more" if len(self.logs) > 1 else ""
        return plain((f"{self.logs[0]}{more}: " if self.logs else "") + self.message)


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """The same finding about several logs is one finding."""
    logs: dict[tuple[str, str], list[str]] = {}
    for finding in findings:
        names = logs.setdefault((finding.code, finding.message), [])
        names += [name for name in finding.logs if name not in names]
    return [Finding(code, message, tuple(names)) for (code, message), names in logs.items()]


def plain(text: str) -> str:
    """Strangers' text without control characters for the terminal and without lone surrogates."""
    text = text[:400].encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(character if character.isprintable() else "?" for character in text)
