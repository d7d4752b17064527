//! Kernels and containers that offer little.

use super::*;

/// What a container's filter does, and a kernel that was built without it: every call is allowed
/// but `io_uring_setup`. It holds for this thread and those that it starts.
fn refuse_io_uring(errno: Errno) {
    let statement = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let refused = libc::SECCOMP_RET_ERRNO | errno.raw_os_error() as u32;
    let mut program = [
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        statement(
            libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
            0,
            1,
            libc::SYS_io_uring_setup as u32,
        ),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, refused),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: 4, filter: program.as_mut_ptr() };
    // SAFETY: a filter of four statements, which is copied.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let mode = libc::SECCOMP_MODE_FILTER;
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const filter), 0);
    }
}

/// Gives a capability of this thread back.
fn give_back(capability: u32) {
    let header = [0x2008_0522_u32, 0];
    let mut sets = [0_u32; 6];
    // SAFETY: the structures of version 3, of 8 and of 24 bytes.
    unsafe {
        assert_eq!(libc::syscall(libc::SYS_capget, header.as_ptr(), sets.as_mut_ptr()), 0);
        sets[0] &= !(1 << capability);
        sets[1] &= !(1 << capability);
        assert_eq!(libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr()), 0);
    }
}

/// Who asks for rings is told why there are none, and who does not has a volume all the same.
fn assert_does_without_io_uring(location: &Location, because: Errno) {
    let shape = Shape::new(vec![10]);
    let options = Options { engine: EngineKind::IoUring, ..kept() };
    let error = Volume::create(location, &shape, &options, &pool()).expect_err("refused");
    assert_says(&error, &["io_uring", "volume `v`", "io_uring_disabled", "seccomp"]);
    assert_eq!(errno(&error), Some(because));
    let options = Options { engine: EngineKind::Auto, ..kept() };
    assert_works(location, &options);
    let volume = Volume::open(location, &options, &pool()).expect("opened");
    assert!(!volume.has_rings());
    drop(volume);
    found::remove(location, SOON).expect("nobody uses it");
}

#[test]
#[ignore = "the other tests run it, in a process of its own"]
fn child_has_no_io_uring() {
    let Some(root) = child_root() else { return };
    let location = location_in(&root, 3);
    // Of two filters that refuse, the newer one counts.
    for because in [Errno::PERM, Errno::NOSYS] {
        refuse_io_uring(because);
        assert_does_without_io_uring(&location, because);
    }
}

#[test]
fn without_io_uring_calls_are_positional_or_refused() {
    assert_succeeds("kernel::child_has_no_io_uring");
}

const SYSCTL: &str = "/proc/sys/kernel/io_uring_disabled";

/// The sysctl as it was.
struct Restored(String);

impl Drop for Restored {
    fn drop(&mut self) {
        fs::write(SYSCTL, &self.0).expect("restored");
    }
}

/// At 1 the kernel refuses it to those without privileges, so nothing else of root is held up.
#[test]
#[ignore = "sets a sysctl of the machine while it runs, which takes root"]
fn where_a_sysctl_forbids_io_uring_calls_are_positional_or_refused() {
    let _restored = Restored(fs::read_to_string(SYSCTL).expect("Linux 6.6 or later"));
    fs::write(SYSCTL, "1").expect("root");
    assert_succeeds("kernel::child_has_no_privileges");
}

#[test]
#[ignore = "the other tests run it, in a process of its own"]
fn child_has_no_privileges() {
    let Some(root) = child_root() else { return };
    // CAP_SYS_ADMIN.
    give_back(21);
    assert_does_without_io_uring(&location_in(&root, 3), Errno::PERM);
}

#[test]
#[ignore = "the other tests run it, in a process of its own"]
fn child_may_lock_little() {
    let Some(root) = child_root() else { return };
    // Privileged processes do not feel the limit: CAP_IPC_LOCK.
    give_back(14);
    let limit = |nbytes| libc::rlimit { rlim_cur: nbytes, rlim_max: nbytes };
    // Room for the rings, of a few pages each, and not for the buffers.
    let (little, none) = (limit(200 << 10), limit(0));
    // SAFETY: a limit for this process.
    unsafe { assert_eq!(libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const little), 0) };
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
