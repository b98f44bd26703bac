"""`make certify`: run every check, write docs/certificate.md, fail when something is out of bounds."""

from __future__ import annotations

import sys

from tests.certify.certificate_table import PAGE, page, unexplained
from tests.certify.certifier import certify_all


def main() -> int:
    """Exit status: 1 when a name fails."""
    rows = []
    for row in certify_all():
        worst = ", ".join(f"{check} {error:.0e}" for check, error in row.errors.items())
        print(f"{row.family} {row.name}: {worst or 'not certified'}", flush=True)
        rows.append(row)
    PAGE.write_text(page(rows), encoding="utf-8")
    failures = [failure for row in rows for failure in row.failures()]
    failures += [f"{dash}: a dash needs a reason, a reason a dash" for dash in unexplained(rows)]
    print("\n".join(failures) or f"{len(rows)} names certified, written to {PAGE.name}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
