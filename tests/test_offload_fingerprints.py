"""When a step verifies fingerprints, and when they have to be taken."""

from stepwell.offload.fingerprints import FingerprintStatus

ONE, OTHER = "one", "other"


def test_what_was_written_is_verified_once():
    fingerprints = FingerprintStatus()
    fingerprints.mark_unverified([ONE])
    assert fingerprints.is_unverified(ONE)
    assert not fingerprints.is_unverified(OTHER)
    fingerprints.mark_verified([ONE, OTHER])
    assert not fingerprints.is_unverified(ONE)


def test_a_step_leaves_fingerprints_outdated_but_where_it_verifies_them():
    fingerprints = FingerprintStatus()
    fingerprints.mark_unverified([ONE])
    fingerprints.mark_outdated([ONE, OTHER])
    assert fingerprints.outdated([ONE, OTHER]) == [OTHER]
    fingerprints.mark_current(OTHER)
    assert fingerprints.outdated([ONE, OTHER]) == []


def test_what_was_written_by_others_has_fingerprints_of_its_own():
    fingerprints = FingerprintStatus()
    fingerprints.mark_outdated([ONE, OTHER])
    fingerprints.mark_unverified([ONE])
    assert fingerprints.outdated([ONE, OTHER]) == [OTHER]


def test_what_is_stepped_no_more_is_forgotten():
    """A set that kept it would keep the parameter alive."""
    fingerprints = FingerprintStatus()
    fingerprints.mark_outdated([ONE])
    fingerprints.mark_unverified([OTHER])
    fingerprints.forget(iter([ONE, OTHER]))
    assert fingerprints.outdated([ONE, OTHER]) == []
    assert not fingerprints.is_unverified(OTHER)
