//! Files of tensors: what is read and written is that, at any offset, size and address, or there is
//! an error with path and offset.

#[path = "drives/mod.rs"]
mod drives;

use std::{
    fs::{self, OpenOptions},
    os::{fd::AsFd, unix::fs::OpenOptionsExt},
    path::Path,
    sync::Arc,
    time::Duration,
};

use drives::{Call, Drives, Effect, SOON, engines};
use proptest::prelude::*;
use rustix::io::Errno;
use stepwell::{
    Error, Result,
    tier::io::{
        EngineKind,
        disk::Between,
        files::{Files, Options, Place, Transfer},
    },
};

fn files(engine: EngineKind, between: Option<Between>) -> Files {
    Files::new(&Options { engine, block_bytes: 8192, queue_depth: 4, between }).expect("files")
}

fn faulty(drives: &Arc<Drives>) -> Files {
    files(EngineKind::Positional, drives.between())
}

/// Page-aligned memory, of which tests use parts.
#[repr(C, align(4096))]
struct Page([u8; 4096]);

struct Memory(Vec<Page>);

impl Memory {
    fn new(nbytes: usize, seed: u8) -> Self {
        let mut memory = Self((0..nbytes / 4096 + 2).map(|_| Page([0; 4096])).collect());
        for (index, byte) in memory.bytes().iter_mut().enumerate() {
            *byte = (index.wrapping_mul(31) >> 3) as u8 ^ seed;
        }
        memory
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: pages are bytes, without padding.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), self.0.len() * 4096) }
    }
}

fn end(transfer: &Transfer) -> Result<()> {
    assert!(transfer.wait(SOON)?.is_some(), "no answer: {transfer:?}");
    assert!(transfer.is_over());
    Ok(())
}

fn write(files: &Files, path: &Path, offset: u64, bytes: &mut [u8]) -> Result<()> {
    // SAFETY: the bytes are borrowed until the write is over.
    end(&unsafe { files.write(Place::Path(path), offset, bytes.as_ptr(), bytes.len()) }?)
}

fn read(files: &Files, path: &Path, offset: u64, bytes: &mut [u8]) -> Result<()> {
    // SAFETY: the bytes are borrowed until the read is over.
    end(&unsafe { files.read(path, offset, bytes.as_mut_ptr(), bytes.len()) }?)
}

fn errno(error: &Error) -> Option<Errno> {
    match error {
        Error::Os { source, .. } => source.raw_os_error().map(Errno::from_raw_os_error),
        _ => None,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(thread_sanitizer) { 4 } else { 48 }))]

    #[test]
    fn any_offset_size_and_address(
        writes in prop::collection::vec((0_u64..40_000, 0_usize..40_000, 0_usize..4096), 1..4),
        is_ring: bool,
    ) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("tensor");
        let files = files(engines()[usize::from(!is_ring)], None);
        let mut expected = Vec::new();
        for (seed, (offset, nbytes, address)) in writes.into_iter().enumerate() {
            let mut memory = Memory::new(address + nbytes, seed as u8 + 1);
            let bytes = &mut memory.bytes()[address..][..nbytes];
            write(&files, &path, offset, bytes).expect("written");
            let end = offset as usize + nbytes;
            if nbytes > 0 {
                expected.resize(expected.len().max(end), 0);
                expected[offset as usize..end].copy_from_slice(bytes);
            }
            prop_assert!(fs::read(&path).expect("read") == expected, "what is in the file");
            let before = bytes.to_vec();
            bytes.fill(0);
            read(&files, &path, offset, bytes).expect("read");
            prop_assert!(bytes == &before[..], "what is read");
        }
    }

    /// Neighbours share a page of the file.
    #[test]
    fn neighbours_in_flight_leave_each_other_alone(
        sizes in prop::collection::vec(1_usize..20_000, 2..6),
        is_ring: bool,
    ) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("tensor");
        let files = files(engines()[usize::from(!is_ring)], None);
        let mut memories: Vec<Memory> =
            sizes.iter().enumerate().map(|(at, &size)| Memory::new(size, at as u8)).collect();
        let (mut offset, mut expected, mut transfers) = (0, Vec::new(), Vec::new());
        for (memory, &nbytes) in memories.iter_mut().zip(&sizes) {
            let bytes = &memory.bytes()[..nbytes];
            expected.extend_from_slice(bytes);
            // SAFETY: the memory is alive and unchanged until all are over.
            let begun = unsafe { files.write(Place::Path(&path), offset, bytes.as_ptr(), nbytes) };
            transfers.push(begun.expect("begun"));
            offset += nbytes as u64;
        }
        transfers.iter().for_each(|transfer| end(transfer).expect("written"));
        prop_assert!(fs::read(&path).expect("read") == expected);
    }
}

#[test]
fn a_file_that_ends_too_early_is_an_error() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("tensor");
    let mut memory = Memory::new(30_000, 3);
    for engine in engines() {
        let files = files(engine, None);
        write(&files, &path, 0, &mut memory.bytes()[..30_000]).expect("written");
        for len in [0, 1, 4096, 29_999] {
            OpenOptions::new().write(true).open(&path).expect("opened").set_len(len).expect("cut");
            let error = read(&files, &path, 0, &mut memory.bytes()[..30_000]).expect_err("cut");
            assert_eq!(errno(&error), Some(Errno::NODATA), "{len}: {error}");
            let text = error.to_string();
            assert!(text.contains("tensor, offset `") && text.starts_with("cannot read"), "{text}");
        }
    }
}

#[test]
fn failures_of_the_drive_name_path_and_offset() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("tensor");
    let mut memory = Memory::new(50_000, 3);
    for (call, expected) in
        [(Call::Write, Errno::NOSPC), (Call::Write, Errno::IO), (Call::Read, Errno::IO)]
    {
        let drives = Drives::new();
        let files = faulty(&drives);
        write(&files, &path, 0, &mut memory.bytes()[..50_000]).expect("written");
        drives.fault(0, call, 2, Effect::Fails(expected));
        let bytes = &mut memory.bytes()[..50_000];
        let error = match call {
            Call::Write => write(&files, &path, 0, bytes),
            _ => read(&files, &path, 0, bytes),
        }
        .expect_err("fails");
        assert_eq!(errno(&error), Some(expected), "{error}");
        assert!(error.to_string().contains("tensor, offset `"), "{error}");
        drives.repair();
        write(&files, &path, 0, bytes).expect("the handle goes on");
    }
}

#[test]
fn calls_that_do_a_part_are_gone_on_from() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("tensor");
    let drives = Drives::new();
    let files = faulty(&drives);
    let mut memory = Memory::new(50_000, 3);
    drives.fault(0, Call::Write, 0, Effect::Short(5000));
    drives.fault(0, Call::Read, 0, Effect::Short(5000));
    let bytes = &mut memory.bytes()[..50_000];
    write(&files, &path, 100, bytes).expect("written");
    assert!(fs::read(&path).expect("read")[100..] == *bytes);
    let before = bytes.to_vec();
    bytes.fill(0);
    read(&files, &path, 100, bytes).expect("read");
    assert!(*bytes == before);
}

#[test]
fn what_hangs_is_not_over() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("tensor");
    let drives = Drives::new();
    let files = faulty(&drives);
    let mut memory = Memory::new(9000, 3);
    drives.fault(0, Call::Write, 0, Effect::Hangs);
    let bytes = &memory.bytes()[..9000];
    // SAFETY: the memory is alive until the write is over.
    let transfer = unsafe { files.write(Place::Path(&path), 0, bytes.as_ptr(), bytes.len()) };
    let transfer = transfer.expect("begun");
    assert!(drives.hangs(SOON));
    assert!(transfer.wait(Duration::ZERO).expect("none yet").is_none());
    assert!(!transfer.is_over());
    drives.release();
    end(&transfer).expect("written");
}

#[test]
fn a_descriptor_s_own_flags_have_no_effect() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("tensor");
    let mut memory = Memory::new(50_000, 3);
    for engine in engines() {
        for flags in [libc::O_APPEND, libc::O_DIRECT, libc::O_APPEND | libc::O_DIRECT] {
            fs::write(&path, [9; 100]).expect("written");
            let files = files(engine, None);
            let file = OpenOptions::new().write(true).custom_flags(flags).open(&path);
            let file = file.expect("opened");
            let bytes = &memory.bytes()[..50_000];
            let place = Place::Descriptor(file.as_fd());
            // SAFETY: the memory is alive until the write is over.
            let transfer = unsafe { files.write(place, 50, bytes.as_ptr(), bytes.len()) };
            let transfer = transfer.expect("begun");
            drop(file);
            end(&transfer).expect("written");
            let found = fs::read(&path).expect("read");
            assert!(found[..50] == [9; 50] && found[50..] == *bytes, "{flags:o}");
        }
    }
}

#[test]
fn what_cannot_be_opened_is_an_error_at_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let files = files(EngineKind::Auto, None);
    let mut memory = Memory::new(10, 3);
    let missing = folder.path().join("missing");
    let error = read(&files, &missing, 0, &mut memory.bytes()[..10]).expect_err("missing");
    assert_eq!(errno(&error), Some(Errno::NOENT));
    let error = write(&files, &missing.join("x"), 0, &mut memory.bytes()[..10]).expect_err("none");
    assert_eq!(errno(&error), Some(Errno::NOENT));
    assert!(error.to_string().contains("missing/x"), "{error}");
    let error = write(&files, &missing, u64::MAX, &mut memory.bytes()[..10]).expect_err("beyond");
    assert!(matches!(error, Error::Value(_)), "{error}");
    let options = |block_bytes, queue_depth| Options {
        engine: EngineKind::Auto,
        block_bytes,
        queue_depth,
        between: None,
    };
    for (refused, name) in [(options(0, 1), "block_bytes"), (options(1, 0), "queue_depth")] {
        assert!(Files::new(&refused).expect_err("refused").to_string().contains(name));
    }
}
