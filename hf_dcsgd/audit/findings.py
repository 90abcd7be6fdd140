"""What an audit finds: one line per property, with the measured and the allowed value."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One property of the mechanism: `measured` must not exceed `allowed`."""

    name: str
    measured: float
    allowed: float
    detail: str = ""

    @property
    def passed(self) -> bool:
        return bool(self.measured <= self.allowed)

    def __str__(self) -> str:
        verdict = "ok  " if self.passed else "FAIL"
        text = f"{verdict} {self.name}: {self.measured:.6g} (allowed {self.allowed:.6g})"
        return f"{text}  {self.detail}" if self.detail else text


@dataclass
class AuditReport:
    """All findings of one level on one trainer."""

    level: str
    subject: str
    findings: list[Finding] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return bool(self.findings) and all(finding.passed for finding in self.findings)

    @property
    def failures(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.passed]

    def extend(self, findings: Iterable[Finding]) -> AuditReport:
        self.findings.extend(findings)
        return self

    def to_dict(self) -> dict[str, Any]:
        findings = [{**asdict(finding), "passed": finding.passed} for finding in self.findings]
        return {"level": self.level, "subject": self.subject, "passed": self.passed, "findings": findings}

    def __str__(self) -> str:
        return "\n".join([self.summary(), *(f"  {f}" for f in self.findings if f.passed)])

    def summary(self) -> str:
        """Give the verdict in one line; failures each on a line of their own."""
        verdict = f"passed, {len(self.findings)} checks" if self.passed else "FAILED"
        return "\n".join([f"{self.level} on {self.subject}: {verdict}", *(f"  {f}" for f in self.failures)])
