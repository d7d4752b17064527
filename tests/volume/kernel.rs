//! Kernels and containers that offer little.

use super::*;

#[test]
#[ignore = "the other tests run it, in a process of its own"]
fn child_has_no_io_uring() {
    let Some(root) = child_root() else { return };
    // What a container's filter does: every call is allowed but io_uring_setup, which gets EPERM.
    let statement = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut program = [
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        statement(
            libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
            0,
            1,
            libc::SYS_io_uring_setup as u32,
        ),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | 1),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: 4, filter: program.as_mut_ptr() };
    // SAFETY: a filter of four statements, which is copied; it holds for this thread and those
    // that it starts.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let mode = libc::SECCOMP_MODE_FILTER;
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const filter), 0);
    }
    let location = location_in(&root, 3);
    let shape = Shape::new(vec![10]);
    let options = Options { engine: EngineKind::IoUring, ..kept() };
    let error = Volume::create(&location, &shape, &options, &pool()).expect_err("refused");
    assert_says(&error, &["io_uring", "volume `v`", "io_uring_disabled", "seccomp"]);
    assert_eq!(errno(&error), Some(Errno::PERM));
    let options = Options { engine: EngineKind::Auto, ..kept() };
    assert_works(&location, &options);
    let volume = Volume::open(&location, &options, &pool()).expect("opened");
    assert!(!volume.has_rings());
}

#[test]
fn without_io_uring_calls_are_positional_or_refused() {
    assert_succeeds("kernel::child_has_no_io_uring");
}

#[test]
#[ignore = "the other tests run it, in a process of its own"]
fn child_may_lock_little() {
    let Some(root) = child_root() else { return };
    // Privileged processes do not feel the limit: this thread gives the capability back.
    let header = [0x2008_0522_u32, 0];
    let mut sets = [0_u32; 6];
    let limit = |nbytes| libc::rlimit { rlim_cur: nbytes, rlim_max: nbytes };
    // Room for the rings, of a few pages each, and not for the buffers.
    let (little, none) = (limit(200 << 10), limit(0));
    // SAFETY: the structures of version 3, of 8 and of 24 bytes; a limit for this process.
    unsafe {
        assert_eq!(libc::syscall(libc::SYS_capget, header.as_ptr(), sets.as_mut_ptr()), 0);
        let ipc_lock = 1 << 14;
        sets[0] &= !ipc_lock;
        sets[1] &= !ipc_lock;
        assert_eq!(libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr()), 0);
        assert_eq!(libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const little), 0);
    }
    let location = location_in(&root, 3);
    let rings = Options { engine: EngineKind::IoUring, ..kept() };
    assert_works(&location, &rings);
    // SAFETY: as above.
    unsafe { assert_eq!(libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const none), 0) };
    let error = Volume::open(&location, &rings, &pool()).expect_err("no room for rings");
    assert_says(&error, &["io_uring", "RLIMIT_MEMLOCK", "`0 bytes`"]);
    let volume = Volume::open(&location, &kept(), &pool()).expect("opened");
    assert!(!volume.has_rings());
    assert_is_step(&volume, 2);
}

#[test]
fn a_ring_does_without_registered_buffers_and_a_volume_without_rings() {
    if engines()[0] != EngineKind::IoUring {
        return;
    }
    assert_succeeds("kernel::child_may_lock_little");
}
