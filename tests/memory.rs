//! Buffers of host memory: size, contents, huge pages, locking.

use std::slice;

use stepwell::Error;
use stepwell::host::memory::{Buffer, BufferConfig, huge_page_policy, memlock_limit_bytes};
use stepwell::host::pool::{Pool, PoolConfig};

const MIB: usize = 1 << 20;

fn pool() -> Pool {
    Pool::new(&PoolConfig { threads: Some(3), ..PoolConfig::default() }).expect("pool")
}

fn buffer(nbytes: usize) -> Buffer {
    Buffer::new(nbytes, &BufferConfig::default(), &pool()).expect("buffer")
}

/// Begin, end and permissions of every entry of this process's memory map.
fn map() -> Vec<(usize, usize, String)> {
    let text = std::fs::read_to_string("/proc/self/maps").expect("maps");
    text.lines()
        .map(|line| {
            let (range, rest) = line.split_once(' ').expect("range");
            let (begin, end) = range.split_once('-').expect("begin-end");
            let parse = |text| usize::from_str_radix(text, 16).expect("hex");
            (parse(begin), parse(end), rest[..4].to_owned())
        })
        .collect()
}

/// A figure of the map's entry that begins here, in bytes.
fn smaps_bytes(begin: usize, field: &str) -> usize {
    let text = std::fs::read_to_string("/proc/self/smaps").expect("smaps");
    let entry = text.split_once(&format!("\n{begin:x}-")).expect("an entry").1;
    let value = entry
        .split_once(&format!("\n{field}:"))
        .expect("a field")
        .1
        .split_once("kB")
        .expect("kB")
        .0;
    value.trim().parse::<usize>().expect("a number") << 10
}

#[test]
fn zeroed_writable_resident_and_of_exact_size() {
    let page = rustix::param::page_size();
    for nbytes in
        [0, 1, page - 1, page, page + 1, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1, 9 * MIB + 5, 33 * MIB]
    {
        let buffer = buffer(nbytes);
        assert_eq!(buffer.nbytes(), nbytes);
        let begin = buffer.as_ptr().addr();
        assert_eq!(begin % page, 0);
        let len = nbytes.max(1).next_multiple_of(page);
        let entry = map().into_iter().find(|entry| entry.0 == begin).expect("an entry of its own");
        assert_eq!(entry, (begin, begin + len, "rw-p".to_owned()), "exact size");
        assert_eq!(smaps_bytes(begin, "Rss"), len, "all of it faulted in");
        // SAFETY: the buffer holds `nbytes` bytes, and nothing else uses it.
        let bytes = unsafe { slice::from_raw_parts_mut(buffer.as_ptr(), nbytes) };
        assert!(bytes.iter().all(|&byte| byte == 0));
        bytes.fill(0xa5);
        assert!(bytes.iter().all(|&byte| byte == 0xa5));
    }
}

#[test]
fn neighbours_are_not_accessible() {
    let page = rustix::param::page_size();
    for nbytes in [1, 3 * MIB] {
        let buffer = buffer(nbytes);
        let begin = buffer.as_ptr().addr();
        let end = begin + nbytes.next_multiple_of(page);
        for address in [begin - 1, end] {
            let entry = map()
                .into_iter()
                .find(|entry| (entry.0..entry.1).contains(&address))
                .expect("reserved");
            assert_eq!(entry.2, "---p");
        }
    }
}

#[test]
fn dropping_unmaps() {
    let buffer = buffer(64 * MIB);
    let (begin, end) = (buffer.as_ptr().addr(), buffer.as_ptr().addr() + 64 * MIB);
    let is_mapped = || map().iter().any(|entry| (entry.0, entry.1) == (begin, end));
    assert!(is_mapped());
    drop(buffer);
    assert!(!is_mapped());
}

#[test]
fn huge_pages_are_measured() {
    let buffer = buffer(64 * MIB + 4096);
    assert_eq!(buffer.huge_page_bytes(), smaps_bytes(buffer.as_ptr().addr(), "AnonHugePages"));
    match huge_page_policy() {
        // A fragmented machine may give fewer; none at all would be a mistake of ours.
        Some(policy) if !policy.contains("[never]") => {
            assert!(buffer.huge_page_bytes() > 0, "policy `{policy}`")
        }
        _ => assert_eq!(buffer.huge_page_bytes(), 0),
    }
}

#[test]
fn a_size_beyond_the_machine_is_an_error() {
    let new = |nbytes| Buffer::new(nbytes, &BufferConfig::default(), &pool());
    for nbytes in [usize::MAX, usize::MAX / 2] {
        let error = new(nbytes).expect_err("too large");
        assert!(
            matches!(error, Error::Value(_)) && error.to_string().contains(&format!("`{nbytes}`")),
            "{error}"
        );
    }
    let error = new(1 << 50).expect_err("too large");
    assert!(matches!(error, Error::Os { .. }) && error.to_string().contains("hint: "), "{error}");
    // The kernel has the addresses, and would give pages until it kills.
    let error = new(1 << 46).expect_err("too large");
    assert!(matches!(error, Error::Os { .. }) && error.to_string().contains("are free"), "{error}");
}

#[test]
fn locked_memory_is_locked() {
    let buffer =
        Buffer::new(3000, &BufferConfig { lock: true }, &pool()).expect("one page may be locked");
    assert!(buffer.locked());
    assert_eq!(smaps_bytes(buffer.as_ptr().addr(), "Locked"), rustix::param::page_size());
}

#[test]
fn a_refused_lock_names_the_limit() {
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

    let Some(limit) = memlock_limit_bytes().filter(|&limit| limit < 256 << 20) else {
        eprintln!("skipped: RLIMIT_MEMLOCK is too high to go beyond in a test");
        return;
    };
    // Capabilities belong to a thread: this one gives up the right to lock without limit.
    let mut mine = capabilities(None).expect("capabilities");
    mine.effective.remove(CapabilitySet::IPC_LOCK);
    set_capabilities(None, mine).expect("capabilities can be given up");

    let nbytes = limit as usize + MIB;
    let error =
        Buffer::new(nbytes, &BufferConfig { lock: true }, &pool()).expect_err("beyond the limit");
    let message = error.to_string();
    assert!(matches!(error, Error::Os { .. }), "{message}");
    for part in [
        "RLIMIT_MEMLOCK",
        &format!("`{limit} bytes`"),
        &format!("`{nbytes}`"),
        "ulimit -l",
        "hint: ",
    ] {
        assert!(message.contains(part), "no {part} in: {message}");
    }
}
