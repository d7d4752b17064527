//! Tests in a forked child.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    time::Duration,
};

/// What takes longer hangs.
pub(crate) const TIME_LIMIT: Duration = Duration::from_secs(60);

/// Runs a body in a forked child, which a signal ends when it takes too long, and fails unless it
/// returns true.
pub(crate) fn in_forked_child(body: impl FnOnce() -> bool) {
    // SAFETY: the child runs `body` and leaves by `_exit`: it touches no lock that another thread
    // of the parent may have held at the fork, but those that are fork-safe (the allocator's) or
    // under test (the pool's).
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "cannot fork");
    if child == 0 {
        // SAFETY: sets a timer of the child.
        unsafe { libc::alarm(TIME_LIMIT.as_secs() as u32 / 2) };
        let code = match catch_unwind(AssertUnwindSafe(body)) {
            Ok(true) => 0,
            Ok(false) => 1,
            Err(_) => 2,
        };
        // SAFETY: ends the child without the parent's destructors.
        unsafe { libc::_exit(code) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above; `status` is this frame's.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(
        !libc::WIFSIGNALED(status),
        "child ended by signal {} (14: it hung)",
        libc::WTERMSIG(status)
    );
    assert_eq!(libc::WEXITSTATUS(status), 0, "child failed (1: wrong result, 2: panic)");
}
