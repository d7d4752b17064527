//! Volumes: what was written is read, whatever the drives, the kernel and other processes do, or
//! there is an error that says where.

#[path = "drives/mod.rs"]
mod drives;

use std::{
    fs::{self, File},
    io::{BufRead, BufReader, Write},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use drives::{Call, Drives, Effect, Power};
use proptest::prelude::*;
use rustix::{fs::FlockOperation, io::Errno};
use stepwell::{
    Error, Result,
    host::{
        io_uring,
        pool::{Pool, PoolConfig},
    },
    tier::volume::{
        Durability, EngineKind, Location, Options, RecordBuffer, Shape, Ticket, Volume, found,
        unique_name,
    },
};
use tempfile::TempDir;

/// After which a wait has failed.
const SOON: Duration = Duration::from_secs(30);

/// The ring's, and that of positional calls. Where the kernel has no rings, the second one twice.
fn engines() -> [EngineKind; 2] {
    match io_uring::probe() {
        Ok(()) => [EngineKind::IoUring, EngineKind::Positional],
        Err(error) => {
            eprintln!("skipped: the engine with io_uring, which is not offered here ({error})");
            [EngineKind::Positional; 2]
        }
    }
}

fn pool() -> Pool {
    Pool::new(&PoolConfig { threads: Some(1), ..PoolConfig::default() }).expect("a pool")
}

/// Folders for the members of a volume, on one drive.
struct Place {
    root: TempDir,
    location: Location,
}

impl Place {
    fn new(num_members: usize) -> Self {
        Self::of(tempfile::tempdir().expect("a folder"), num_members)
    }

    /// In memory, where there is such a folder: for tests whose drives are a model.
    fn in_memory(num_members: usize) -> Self {
        let root = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
        Self::of(root.expect("a folder"), num_members)
    }

    fn of(root: TempDir, num_members: usize) -> Self {
        let location = location_in(root.path(), num_members);
        location.folders.iter().for_each(|folder| fs::create_dir(folder).expect("a folder"));
        Self { root, location }
    }

    fn member(&self, member: usize) -> PathBuf {
        member_path(&self.location, member)
    }

    /// Names of all files in the folders.
    fn files(&self) -> Vec<String> {
        let entries = self.location.folders.iter().flat_map(|folder| {
            fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry"))
        });
        let mut names: Vec<String> =
            entries.map(|entry| entry.file_name().into_string().expect("a name")).collect();
        names.sort();
        names
    }

    fn create(&self, sizes: &[usize], options: &Options) -> Result<Volume> {
        let shape = Shape { stripe_bytes: STRIPE, ..Shape::new(sizes.to_vec()) };
        Volume::create(&self.location, &shape, options, &pool())
    }

    fn open(&self) -> Result<Volume> {
        Volume::open(&self.location, &kept(), &pool())
    }
}

fn location_in(root: &Path, num_members: usize) -> Location {
    let folders = (0..num_members).map(|member| root.join(format!("drive{member}"))).collect();
    Location { name: "v".to_owned(), folders }
}

fn member_path(location: &Location, member: usize) -> PathBuf {
    location.folders[member].join(format!("{}.{member}.stepwell", location.name))
}

/// Small, so that records have several pieces.
const STRIPE: usize = 8192;

/// Of one byte, around a block, and of several stripes.
const SIZES: [usize; 9] = [1, 4032, 4033, 70_000, 4096, 8128, 12_345, 33_333, 65_536];

fn kept() -> Options {
    Options { keep: true, num_buffers: 4, ..Options::default() }
}

/// What a step writes to a record.
fn content(record: usize, step: u64, nbytes: usize) -> Vec<u8> {
    let mut state = (record as u64) << 32 | step;
    (0..nbytes.div_ceil(8))
        .flat_map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(0x1405_7b7e);
            (state ^ state >> 29).to_le_bytes()
        })
        .take(nbytes)
        .collect()
}

fn finish(mut ticket: Ticket) -> Result<RecordBuffer> {
    ticket.wait(SOON).map(|buffer| buffer.expect("over soon"))
}

fn buffer(volume: &Volume) -> RecordBuffer {
    volume.buffer(SOON).expect("a free buffer")
}

fn begin_write(volume: &Volume, record: usize, step: u64) -> Result<Ticket> {
    let mut buffer = buffer(volume);
    let bytes = content(record, step, volume.record_nbytes(record)?);
    buffer.as_mut_slice()[..bytes.len()].copy_from_slice(&bytes);
    volume.write(record, step, buffer)
}

fn write(volume: &Volume, record: usize, step: u64) -> Result<()> {
    begin_write(volume, record, step).and_then(finish).map(|_| ())
}

/// Several in flight.
fn write_all(volume: &Volume, step: u64) -> Result<()> {
    let mut tickets = Vec::new();
    for record in 0..volume.num_records() {
        if tickets.len() == 3 {
            finish(tickets.remove(0))?;
        }
        tickets.push(begin_write(volume, record, step)?);
    }
    tickets.into_iter().try_for_each(|ticket| finish(ticket).map(|_| ()))
}

fn read(volume: &Volume, record: usize) -> Result<Vec<u8>> {
    let nbytes = volume.record_nbytes(record)?;
    let buffer = volume.read(record, buffer(volume)).and_then(finish)?;
    Ok(buffer.as_slice()[..nbytes].to_vec())
}

fn assert_is_step(volume: &Volume, step: u64) {
    for record in 0..volume.num_records() {
        let nbytes = volume.record_nbytes(record).expect("a record");
        let found = read(volume, record).expect("whole");
        assert!(found == content(record, step, nbytes), "record {record} of step {step}");
    }
}

/// A volume at committed step 1, closed and kept.
fn left_at_step_1(place: &Place) {
    let volume = place.create(&SIZES, &kept()).expect("made");
    write_all(&volume, 1).expect("written");
    volume.commit(1).expect("committed");
    volume.close().expect("closed");
}

fn flip(path: &Path, offset: u64) {
    let file = File::options().read(true).write(true).open(path).expect("a file");
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).expect("a byte");
    file.write_all_at(&[byte[0] ^ 0x10], offset).expect("a byte");
}

/// The error says all of this.
fn assert_says(error: &Error, words: &[&str]) {
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "`{word}` in: {text}");
    }
}

fn errno(error: &Error) -> Option<Errno> {
    match error {
        Error::Os { source, .. } => source.raw_os_error().map(Errno::from_raw_os_error),
        _ => None,
    }
}

// ---- what holds without faults -----------------------------------------------------------------

#[test]
fn what_was_written_is_read_by_every_engine_and_after_reopening_by_the_other() {
    let [ring, positional] = engines();
    for (engine, other) in [(ring, positional), (positional, ring)] {
        for num_members in [1, 2, 5] {
            let place = Place::new(num_members);
            let volume = place.create(&SIZES, &Options { engine, ..kept() }).expect("made");
            assert_eq!(volume.has_rings(), engine == EngineKind::IoUring);
            assert_eq!((volume.num_records(), volume.step()), (SIZES.len(), None));
            for step in 1..4 {
                write_all(&volume, step).expect("written");
                assert_is_step(&volume, step);
                volume.commit(step).expect("committed");
                assert_eq!(volume.step(), Some(step));
                assert_is_step(&volume, step);
            }
            let (read, written) = volume.bytes_moved();
            assert!(read == 2 * written && written > 3 * SIZES.iter().sum::<usize>() as u64);
            volume.close().expect("closed");

            let options = Options { engine: other, ..kept() };
            let volume = Volume::open(&place.location, &options, &pool()).expect("opened");
            assert_eq!(volume.step(), Some(3));
            assert_is_step(&volume, 3);
            write_all(&volume, 9).expect("written");
            volume.commit(9).expect("committed");
            assert_is_step(&volume, 9);
        }
    }
}

/// Workers of a step share one volume: each writes and reads records of its own.
#[test]
fn threads_share_a_volume() {
    const THREADS: usize = 4;
    for engine in engines() {
        let place = Place::in_memory(3);
        let volume = place.create(&[9000; 4 * THREADS], &Options { engine, ..kept() });
        let volume = volume.expect("made");
        for step in 1..20 {
            std::thread::scope(|scope| {
                for thread in 0..THREADS {
                    let volume = &volume;
                    scope.spawn(move || {
                        for record in (thread..volume.num_records()).step_by(THREADS) {
                            if step > 1 {
                                let found = read(volume, record).expect("whole");
                                assert!(found == content(record, step - 1, 9000));
                            }
                            write(volume, record, step).expect("written");
                        }
                    });
                }
            });
            volume.commit(step).expect("committed");
        }
        assert_is_step(&volume, 19);
    }
}

#[test]
fn weights_decide_what_a_member_holds() {
    let place = Place::new(3);
    let shape =
        Shape { weights: vec![400, 400, 200], stripe_bytes: 4096, ..Shape::new(vec![40_000; 50]) };
    let volume = Volume::create(&place.location, &shape, &kept(), &pool()).expect("made");
    write_all(&volume, 1).expect("written");
    volume.commit(1).expect("committed");
    assert_is_step(&volume, 1);
    let sizes: Vec<u64> =
        volume.paths().iter().map(|path| fs::metadata(path).expect("a file").len()).collect();
    assert_eq!(sizes[0], sizes[1]);
    // Headers and indices beside the records: 128 KiB and 4 blocks.
    let records = |size: u64| size - (128 << 10) - 4 * 4096;
    assert_eq!(records(sizes[0]), 2 * records(sizes[2]));
}

#[test]
fn a_step_that_was_not_committed_is_gone_after_reopening_and_after_a_revert() {
    let place = Place::new(2);
    let volume = place.create(&SIZES, &kept()).expect("made");
    write_all(&volume, 1).expect("written");
    volume.commit(1).expect("committed");
    write_all(&volume, 2).expect("written");
    assert_is_step(&volume, 2);
    volume.revert().expect("nothing in flight");
    assert_is_step(&volume, 1);
    // A part of the records only: the others stay as they are.
    write(&volume, 3, 2).expect("written");
    volume.commit(2).expect("committed");
    write(&volume, 4, 3).expect("written");
    volume.close().expect("closed");
    let volume = place.open().expect("opened");
    assert_eq!(volume.step(), Some(2));
    for (record, nbytes) in SIZES.into_iter().enumerate() {
        let step = if record == 3 { 2 } else { 1 };
        let found = read(&volume, record).expect("whole");
        assert!(found == content(record, step, nbytes), "record {record}");
    }
}

#[test]
fn files_are_removed_unless_they_are_kept() {
    let place = Place::new(2);
    let options = Options { keep: false, ..kept() };
    let volume = place.create(&SIZES, &options).expect("made");
    assert_eq!(place.files(), ["v.0.stepwell", "v.1.stepwell"]);
    volume.close().expect("closed");
    assert!(place.files().is_empty());
    drop(place.create(&SIZES, &options).expect("the name is free again"));
    assert!(place.files().is_empty());
    left_at_step_1(&place);
    assert_eq!(place.files().len(), 2);
    drop(Volume::open(&place.location, &options, &pool()).expect("opened"));
    assert!(place.files().is_empty());
}

#[test]
fn without_durability_there_is_one_slot_and_nothing_is_left() {
    for engine in engines() {
        let place = Place::new(2);
        let shape = Shape { durability: Durability::None, ..Shape::new(SIZES.to_vec()) };
        let options = Options { engine, keep: false, ..kept() };
        let volume = Volume::create(&place.location, &shape, &options, &pool()).expect("made");
        assert!(place.files().is_empty(), "they have no names");
        for step in 1..4 {
            write_all(&volume, step).expect("written");
            volume.commit(step).expect("committed");
            assert_is_step(&volume, step);
        }
        let error = volume.revert().expect_err("in place");
        assert_says(&error, &["in place"]);
        let kept = Volume::create(&place.location, &shape, &kept(), &pool());
        assert_says(&kept.expect_err("nothing to keep"), &["keep", "durability"]);
    }
}

#[test]
fn misuse_is_refused_and_named() {
    let place = Place::new(2);
    let volume = place.create(&[100, 200], &kept()).expect("made");
    let unwritten = volume.read(1, buffer(&volume)).expect_err("never written");
    assert_says(&unwritten, &["record `1`", "volume `v`", "never written"]);
    let missing = volume.read(2, buffer(&volume)).expect_err("no such record");
    assert_says(&missing, &["record is `2`", "`2` of volume"]);
    let other = Place::new(1);
    let other = other.create(&[100], &kept()).expect("made");
    let foreign = volume.write(0, 1, buffer(&other)).expect_err("a buffer of another volume");
    assert_says(&foreign, &["another volume"]);
    write(&volume, 0, 1).expect("written");
    assert_says(&volume.commit(2).expect_err("of another step"), &["record `0`", "step `1`"]);
    let mut ticket = begin_write(&volume, 0, 1).expect("begun");
    ticket.wait(SOON).expect("written").expect("over soon");
    assert_says(&ticket.wait(SOON).expect_err("given"), &["again"]);
    volume.commit(1).expect("committed");
    // All buffers are with a caller.
    let taken: Vec<RecordBuffer> = (0..4).map(|_| buffer(&volume)).collect();
    assert!(volume.buffer(Duration::ZERO).is_none());
    drop(taken);
    buffer(&volume);

    let refused = |location: &Location, shape: &Shape| {
        Volume::create(location, shape, &kept(), &pool()).expect_err("refused")
    };
    let shape = Shape::new(vec![100]);
    for name in ["", ".v", "a/b", "a b"] {
        let location = Location { name: name.to_owned(), ..place.location.clone() };
        assert_says(&refused(&location, &shape), &[&format!("is `{name}`")]);
    }
    let fresh = Location { name: unique_name().expect("a name"), ..place.location.clone() };
    let twice = Location { folders: vec![fresh.folders[0].clone(); 2], ..fresh.clone() };
    assert_says(&refused(&twice, &shape), &["member `1`", "another member's"]);
    let weights = Shape { weights: vec![1], ..shape.clone() };
    assert_says(&refused(&fresh, &weights), &["`1` weights", "2 members"]);
    let stripe = Shape { stripe_bytes: 0, ..shape.clone() };
    assert_says(&refused(&fresh, &stripe), &["stripe_bytes is `0`"]);
    assert_says(&refused(&fresh, &Shape::new(vec![7, 0])), &["record `1` has `0` bytes"]);
    let missing = Location { folders: vec![place.root.path().join("none")], ..fresh };
    assert_says(&refused(&missing, &shape), &["member `0`", "none"]);
    assert_eq!(place.files(), ["v.0.stepwell", "v.1.stepwell"], "nothing is left of these");
}

// ---- drives that fail --------------------------------------------------------------------------

#[test]
fn a_write_that_fails_says_where_and_leaves_the_committed_step() {
    let place = Place::new(2);
    let drives = Drives::new();
    let options = Options { between: drives.between(), ..kept() };
    let volume = place.create(&SIZES, &options).expect("made");
    write_all(&volume, 1).expect("written");
    volume.commit(1).expect("committed");
    drives.fault(1, Call::Write, 0, Effect::Fails(Errno::IO));
    let path = place.member(1);
    let where_it_was = ["record `3`", "volume `v`", "member `1`", "offset `", "step `2`"];
    let error = write(&volume, 3, 2).expect_err("on the drive that fails");
    assert_says(&error, &where_it_was);
    assert_says(&error, &[&path.display().to_string()]);
    assert_eq!(errno(&error), Some(Errno::IO));
    assert_says(&volume.commit(2).expect_err("void"), &["record `3`", "void"]);
    assert_says(&read(&volume, 3).expect_err("void"), &["record `3`", "void"]);
    volume.revert().expect("nothing in flight");
    assert_is_step(&volume, 1);
    drives.repair();
    write_all(&volume, 2).expect("written");
    volume.commit(2).expect("committed");
    drop(volume);
    assert_is_step(&place.open().expect("opened"), 2);
}

#[test]
fn a_read_that_fails_says_where() {
    let place = Place::new(2);
    let drives = Drives::new();
    let options = Options { between: drives.between(), ..kept() };
    let volume = place.create(&SIZES, &options).expect("made");
    write_all(&volume, 7).expect("written");
    drives.fault(0, Call::Read, 0, Effect::Fails(Errno::IO));
    let error = read(&volume, 3).expect_err("on the drive that fails");
    assert_says(&error, &["read record `3`", "volume `v`", "member `0`", "offset `", "step `7`"]);
    drives.repair();
    assert_is_step(&volume, 7);
}

#[test]
fn short_calls_are_gone_on_from() {
    let place = Place::new(2);
    let drives = Drives::new();
    drives.fault(0, Call::Write, 0, Effect::Short(4096 + 512));
    drives.fault(1, Call::Read, 0, Effect::Short(4096));
    let options = Options { between: drives.between(), ..kept() };
    let volume = place.create(&SIZES, &options).expect("made");
    write_all(&volume, 1).expect("written");
    volume.commit(1).expect("committed");
    assert_is_step(&volume, 1);
    drop(volume);
    assert_is_step(&place.open().expect("opened"), 1);
}

/// Reads that come back wrong, and writes that went wrong and said nothing.
#[test]
fn wrong_bytes_are_an_error() {
    for (call, effect) in [
        (Call::Read, Effect::Flips(8 * 100)),
        (Call::Write, Effect::Flips(8 * 100)),
        (Call::Write, Effect::Torn(4096)),
        (Call::Write, Effect::Torn(0)),
    ] {
        let place = Place::new(1);
        let drives = Drives::new();
        let options = Options { between: drives.between(), ..kept() };
        let volume = place.create(&SIZES, &options).expect("made");
        write_all(&volume, 1).expect("written");
        volume.commit(1).expect("committed");
        drives.fault(0, call, 0, effect);
        write(&volume, 8, 2).expect("it says");
        let error = read(&volume, 8).expect_err("other bytes");
        assert_says(&error, &["record `8`", "volume `v`", "member `0`", "offset `", "step `2`"]);
        assert_eq!(errno(&error), Some(Errno::BADMSG), "{error}");
    }
}

#[test]
fn what_is_cut_off_an_open_volume_is_an_error() {
    for engine in engines() {
        let place = Place::new(2);
        let volume = place.create(&SIZES, &Options { engine, ..kept() }).expect("made");
        write_all(&volume, 1).expect("written");
        volume.commit(1).expect("committed");
        let file = File::options().write(true).open(place.member(1)).expect("a member");
        // Into the slots: some records end within what is left, or have lost all of it.
        let nbytes = (128 << 10) + 4 * 4096 + 5 * 4096 + 512;
        file.set_len(nbytes).expect("cut");
        let found = volume.check(0..SIZES.len()).expect("an answer for each");
        assert!(!found.is_empty());
        for error in &found {
            assert_says(error, &["record `", "member `1`", "offset `", "step `1`"]);
        }
        assert!(found.iter().any(|error| error.to_string().contains("the file ends here")));
    }
}

#[test]
fn a_write_that_never_landed_is_a_stale_record() {
    let place = Place::new(1);
    let drives = Drives::new();
    let options = Options { between: drives.between(), ..kept() };
    let volume = place.create(&SIZES, &options).expect("made");
    for step in 1..4 {
        if step == 3 {
            drives.fault(0, Call::Write, 0, Effect::Torn(0));
        }
        write(&volume, 5, step).expect("it says");
        drives.repair();
        volume.commit(step).expect("committed");
    }
    let error = read(&volume, 5).expect_err("that of step 1 is there");
    assert_says(&error, &["record `5`", "step `3`", "stale", "step `1`"]);
}

#[test]
fn a_full_drive_is_an_error_when_the_volume_is_made_and_nothing_is_left() {
    let place = Place::new(3);
    let drives = Drives::new();
    drives.fault(1, Call::Allocate, 0, Effect::Fails(Errno::NOSPC));
    let options = Options { between: drives.between(), ..kept() };
    let error = place.create(&SIZES, &options).expect_err("full");
    assert_says(&error, &["volume `v`", "member `1`", "bytes", "are free", "hint: "]);
    assert_eq!(errno(&error), Some(Errno::NOSPC));
    assert!(place.files().is_empty());
}

#[test]
fn after_a_flush_that_failed_nothing_is_done_any_more() {
    // The flush of records on a member without an index; write and flush of each copy of the index.
    for (member, call, after) in
        [(1, Call::Sync, 0), (0, Call::Write, 0), (0, Call::Sync, 1), (2, Call::Sync, 1)]
    {
        let place = Place::new(3);
        let drives = Drives::new();
        let options = Options { between: drives.between(), ..kept() };
        let volume = place.create(&SIZES, &options).expect("made");
        write_all(&volume, 1).expect("written");
        volume.commit(1).expect("committed");
        write_all(&volume, 2).expect("written");
        drives.fault(member, call, after, Effect::Fails(Errno::IO));
        let error = volume.commit(2).expect_err("on the drive that fails");
        let member = format!("member `{member}`");
        assert_says(&error, &["volume `v`", &member, "step `"]);
        drives.repair();
        for error in [
            volume.commit(2).expect_err("broken"),
            write(&volume, 0, 2).expect_err("broken"),
            read(&volume, 0).expect_err("broken"),
            volume.revert().expect_err("broken"),
        ] {
            assert_says(&error, &["not used any more", &member, "open it again"]);
        }
        drop(volume);
        let volume = place.open().expect("opened");
        assert_is_step(&volume, volume.step().expect("a committed step"));
    }
}

#[test]
fn a_drive_that_hangs_holds_nobody_up_for_ever() {
    // The flush of the records, and the write of the index.
    for call in [Call::Sync, Call::Write] {
        let place = Place::new(2);
        let drives = Drives::new();
        let io_timeout = Duration::from_millis(200);
        let options = Options { between: drives.between(), io_timeout, ..kept() };
        let volume = place.create(&SIZES, &options).expect("made");
        write_all(&volume, 1).expect("written");
        drives.fault(1, Call::Read, 0, Effect::Hangs);
        let mut ticket = volume.read(3, buffer(&volume)).expect("begun");
        assert!(ticket.wait(Duration::from_millis(1)).expect("no outcome").is_none());
        assert!(!ticket.is_over() && drives.hangs(SOON));
        assert_says(&begin_write(&volume, 3, 1).expect_err("being read"), &["record `3`"]);
        drives.fault(0, call, 0, Effect::Hangs);
        let error = volume.commit(1).expect_err("no answer");
        assert_eq!(errno(&error), Some(Errno::TIMEDOUT), "{error}");
        assert_says(&volume.commit(1).expect_err("broken"), &["not answered", "not used any more"]);
        let error = volume.close().expect_err("no answer");
        assert_eq!(errno(&error), Some(Errno::TIMEDOUT), "{error}");
        // The request and its buffer outlive the volume.
        drives.release();
        ticket.wait(SOON).expect("read after all").expect("over soon");
    }
}

/// REQ-1: the drive may still write to it.
#[test]
fn a_buffer_is_nobody_elses_until_its_read_has_ended() {
    let place = Place::new(1);
    let drives = Drives::new();
    let options = Options { between: drives.between(), ..kept() };
    let volume = place.create(&SIZES, &options).expect("made");
    write_all(&volume, 1).expect("written");
    drives.fault(0, Call::Read, 0, Effect::Hangs);
    drop(volume.read(0, buffer(&volume)).expect("begun"));
    let free: Vec<RecordBuffer> = (0..3).map(|_| buffer(&volume)).collect();
    assert!(volume.buffer(Duration::from_millis(20)).is_none(), "that of the read");
    drives.release();
    buffer(&volume);
    drop(free);
}

/// What a program does with a volume until the power goes.
fn train_until_cut(place: &Place, power: &std::sync::Arc<Power>) -> Option<u64> {
    let between = power.between(|member| member_path(&place.location, member.min(1)));
    let options = Options { between, ..kept() };
    let volume = place.open_with(&options).ok()?;
    let mut committed = volume.step();
    for step in committed? + 1.. {
        let done = write_all(&volume, step).and_then(|()| volume.commit(step));
        match done {
            Ok(()) => committed = Some(step),
            Err(_) => break,
        }
    }
    committed
}

impl Place {
    fn open_with(&self, options: &Options) -> Result<Volume> {
        Volume::open(&self.location, options, &pool())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// VOL-1: at whatever write or flush the power goes, and whatever of the caches is there then.
    #[test]
    fn a_power_cut_leaves_a_committed_step(
        cuts in prop::collection::vec((0_usize..70, any::<u64>()), 1..4),
    ) {
        let place = Place::in_memory(2);
        left_at_step_1(&place);
        let mut acknowledged = 1;
        for (calls, seed) in cuts {
            let power = Power::new(calls);
            acknowledged = train_until_cut(&place, &power).unwrap_or(acknowledged);
            prop_assert!(power.is_cut());
            let mut random = seed;
            power.leave_behind(|num| {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (random >> 33) as usize % num
            });
            let volume = place.open().expect("a committed step");
            let step = volume.step().expect("a committed step");
            prop_assert!(step == acknowledged || step == acknowledged + 1);
            assert_is_step(&volume, step);
            acknowledged = step;
        }
    }
}

// ---- members that are not what they were -------------------------------------------------------

#[test]
fn a_member_that_is_not_what_it_was_is_named() {
    let opened = |change: &dyn Fn(&Place)| {
        let place = Place::new(3);
        left_at_step_1(&place);
        change(&place);
        place.open().map(|volume| assert_is_step(&volume, 1))
    };
    let refused = |change: &dyn Fn(&Place)| opened(change).expect_err("refused");
    let swap = |place: &Place| {
        let [first, second] = [place.member(1), place.member(2)];
        fs::rename(&first, place.root.path().join("x")).expect("moved");
        fs::rename(&second, &first).expect("moved");
        fs::rename(place.root.path().join("x"), &second).expect("moved");
    };
    let copy_of_another = |place: &Place| {
        let other = Place::new(3);
        left_at_step_1(&other);
        fs::copy(other.member(1), place.member(1)).expect("copied");
    };
    let resize = |nbytes: u64| {
        move |place: &Place| {
            let file = File::options().write(true).open(place.member(2)).expect("a file");
            file.set_len(nbytes).expect("resized");
        }
    };

    opened(&|_| {}).expect("nothing was changed");
    assert_says(
        &refused(&|place| fs::remove_file(place.member(1)).expect("removed")),
        &["volume `v`", "member `1`", "missing"],
    );
    assert_says(&refused(&swap), &["volume `v`", "member `1`", "is member `2`"]);
    assert_says(&refused(&copy_of_another), &["member `1`", "another volume"]);
    assert_says(&refused(&resize(200_000)), &["member `2`", "truncated", "`200000` bytes"]);
    assert_says(&refused(&resize(0)), &["member `2`", "the file ends here"]);
    let zeroed = |place: &Place| {
        let file = File::options().write(true).open(place.member(0)).expect("a file");
        file.write_all_at(&[0; 128 << 10], 0).expect("written");
    };
    assert_says(&refused(&zeroed), &["member `0`", "no member of a volume"]);
    // One of the copies of the header is enough, none is not.
    opened(&|place| flip(&place.member(1), 40)).expect("the other copy");
    opened(&|place| flip(&place.member(1), (64 << 10) + 40)).expect("the other copy");
    let both = |place: &Place| {
        flip(&place.member(1), 40);
        flip(&place.member(1), (64 << 10) + 40);
    };
    assert_says(&refused(&both), &["member `1`", "damaged header"]);
    // The same of the newest index: of generation 2, so at place 0; copy 1 is on the last member.
    let first_index = 128 << 10;
    opened(&|place| flip(&place.member(0), first_index + 70)).expect("the other copy");
    opened(&|place| flip(&place.member(2), first_index + 4096 + 70)).expect("the other copy");
    let both = |place: &Place| {
        flip(&place.member(0), first_index + 70);
        flip(&place.member(2), first_index + 4096 + 70);
    };
    let error = refused(&both);
    assert_says(&error, &["index", "volume `v`", "member `0`"]);
    assert_eq!(errno(&error), Some(Errno::BADMSG));
    // What is opened is whole again: either copy alone would do the next time.
    let twice = |place: &Place| {
        flip(&place.member(0), first_index + 70);
        drop(place.open().expect("the other copy"));
        flip(&place.member(2), first_index + 4096 + 70);
    };
    opened(&twice).expect("the first copy");
    // Fewer folders than members.
    let place = Place::new(3);
    left_at_step_1(&place);
    let fewer = Location { folders: place.location.folders[..2].to_vec(), ..place.location };
    let error = Volume::open(&fewer, &kept(), &pool()).expect_err("one is not named");
    assert_says(&error, &["3` members", "2 are given"]);
}

#[test]
fn a_member_of_an_earlier_time_is_stale() {
    let place = Place::new(2);
    left_at_step_1(&place);
    let old = fs::read(place.member(1)).expect("a member");
    let volume = place.open().expect("opened");
    for step in 2..4 {
        write_all(&volume, step).expect("written");
        volume.commit(step).expect("committed");
    }
    drop(volume);
    // All but its header, which is the same.
    fs::write(place.member(1), old).expect("a member");
    let volume = place.open().expect("the index is on both members");
    let errors: Vec<Error> =
        (0..SIZES.len()).filter_map(|record| read(&volume, record).err()).collect();
    assert!(!errors.is_empty());
    for error in &errors {
        assert_eq!(errno(error), Some(Errno::BADMSG), "{error}");
        assert_says(error, &["volume `v`", "member `1`", "offset `", "step `3`"]);
    }
}

#[test]
fn a_check_names_what_has_changed() {
    let place = Place::new(2);
    left_at_step_1(&place);
    let volume = place.open().expect("opened");
    assert!(volume.check(0..SIZES.len()).expect("read").is_empty());
    drop(volume);
    // The last bytes of a slot are the trailer of its member's last stripe.
    let path = place.member(1);
    let nbytes = fs::metadata(&path).expect("a file").len();
    let slot = (nbytes - (128 << 10) - 4 * 4096) / 2;
    flip(&path, nbytes - slot - 20);
    let volume = place.open().expect("opened");
    let found = volume.check(0..SIZES.len()).expect("read");
    assert_eq!(found.len(), 1);
    assert_says(&found[0], &["record `8`", "member `1`", "step `1`", "trailer is damaged"]);
    volume.check(0..10).expect_err("no such record");
    write(&volume, 8, 2).expect("written");
    volume.commit(2).expect("committed");
    assert!(volume.check(0..SIZES.len()).expect("read").is_empty());
}

#[test]
fn volumes_are_found_in_folders_and_removed_when_nobody_uses_them() {
    let place = Place::new(2);
    fs::write(place.location.folders[0].join("notes.txt"), "other").expect("written");
    fs::write(place.location.folders[0].join("w.3.stepwell"), "none of ours").expect("written");
    let volume = place.create(&SIZES, &kept()).expect("made");
    let list = || found::list(&place.location.folders[0]).expect("read");
    let files = list();
    let names: Vec<(&str, usize)> =
        files.iter().map(|file| (file.name.as_str(), file.member)).collect();
    assert_eq!(names, [("v", 0), ("w", 3)]);
    let contents = files[0].contents.as_ref().expect("a member");
    assert_eq!((contents.member, contents.num_members), (0, 2));
    assert_eq!(contents.num_records, SIZES.len() as u64);
    assert_eq!(files[0].nbytes, fs::metadata(place.member(0)).expect("a file").len());
    let holder = files[0].holder.as_ref().expect("this process");
    assert!(holder.contains(&format!("`{}`", std::process::id())), "{holder}");
    assert_eq!((&files[1].contents, &files[1].holder), (&None, &None));

    let remove = || found::remove(&place.location, SOON);
    assert_says(&remove().expect_err("used"), &["member `0`", "is used by", holder]);
    volume.close().expect("closed");
    assert_eq!(list()[0].holder, None);
    // Of a volume that has lost a member.
    fs::remove_file(place.member(1)).expect("removed");
    remove().expect("nobody uses it");
    assert_eq!(place.files(), ["notes.txt", "w.3.stepwell"]);
    assert_says(&remove().expect_err("gone"), &["volume `v`", "none of its members"]);
    found::list(&place.root.path().join("none")).expect_err("no such folder");
}

// ---- other processes ---------------------------------------------------------------------------

#[test]
fn two_jobs_on_one_path_do_not_touch_each_other() {
    let place = Place::new(2);
    let volume = place.create(&SIZES, &kept()).expect("made");
    write_all(&volume, 1).expect("written");
    volume.commit(1).expect("committed");
    let error = place.create(&SIZES, &kept()).expect_err("the name is taken");
    assert_says(&error, &["volume `v`", "member `0`", "another name"]);
    let error = place.open().expect_err("it is used");
    assert_says(&error, &["member `0`", &format!("process `{}`", std::process::id()), "one job"]);
    let other = Location { name: unique_name().expect("a name"), ..place.location.clone() };
    let other = Volume::create(&other, &Shape::new(vec![10]), &kept(), &pool()).expect("made");
    drop(other);
    assert_is_step(&volume, 1);
}

/// A test of this binary in a process of its own, which knows its folder.
fn child(test: &str, root: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command
        .args([test, "--exact", "--ignored", "--nocapture", "--test-threads", "1"])
        .env(CHILD_ROOT, root)
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit());
    command
}

const CHILD_ROOT: &str = "STEPWELL_TEST_VOLUME_ROOT";
const CHILD_ENGINE: &str = "STEPWELL_TEST_VOLUME_ENGINE";

fn child_root() -> Option<PathBuf> {
    std::env::var_os(CHILD_ROOT).map(PathBuf::from)
}

/// To who has started this process. The harness has begun a line.
fn say(line: &str) {
    let mut out = std::io::stdout();
    writeln!(out, "\n{line}").and_then(|()| out.flush()).expect("somebody reads");
}

/// Trains until it is killed; prints each step once it is committed.
#[test]
#[ignore = "the other tests run it, in a process of its own"]
fn child_trains() {
    let Some(root) = child_root() else { return };
    let engine = engines()[usize::from(std::env::var_os(CHILD_ENGINE).is_some())];
    let options = Options { engine, ..kept() };
    let volume = Volume::open(&location_in(&root, 3), &options, &pool()).expect("opened");
    let begin = volume.step().expect("a committed step") + 1;
    say("");
    for step in begin.. {
        write_all(&volume, step).expect("written");
        volume.commit(step).expect("committed");
        say(&format!("step {step}"));
    }
}

fn kill(child: &mut Child) {
    child.kill().expect("alive");
    child.wait().expect("killed");
}

/// VOL-1 and VOL-4, with real processes.
#[test]
fn a_kill_at_any_moment_leaves_a_committed_step() {
    const KILLS: u64 = 50;
    let place = Place::new(3);
    left_at_step_1(&place);
    let mut step = 1;
    for kills in 0..KILLS {
        let mut command = child("child_trains", place.root.path());
        if kills % 3 == 2 {
            command.env(CHILD_ENGINE, "positional");
        }
        let mut child = command.spawn().expect("started");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let steps = lines.map_while(std::io::Result::ok).filter_map(|line| {
            line.strip_prefix("step ").map(|step| step.parse::<u64>().expect("a number"))
        });
        // Some steps, and then a part of one: so many microseconds, not a number of calls.
        let mut acknowledged = step;
        let mut steps = steps.inspect(|step| acknowledged = *step);
        steps.nth(kills as usize % 3).expect("it trains");
        let moment = Instant::now() + Duration::from_micros(kills * 7919 % 6000);
        while Instant::now() < moment {
            std::hint::spin_loop();
        }
        kill(&mut child);
        steps.by_ref().for_each(drop);
        let volume = place.open().expect("a committed step");
        let found = volume.step().expect("a committed step");
        assert!(
            found == acknowledged || found == acknowledged + 1,
            "step {found} after {acknowledged}"
        );
        assert_is_step(&volume, found);
        step = found;
    }
    assert!(step > KILLS);
}

/// Makes volumes of the same name until it is killed.
#[test]
#[ignore = "the other tests run it, in a process of its own"]
fn child_makes() {
    let Some(root) = child_root() else { return };
    let location = location_in(&root, 3);
    say("begun");
    loop {
        let shape = Shape::new(SIZES.to_vec());
        let options = Options { keep: false, ..kept() };
        drop(Volume::create(&location, &shape, &options, &pool()).expect("made"));
    }
}

#[test]
fn a_kill_while_a_volume_is_made_leaves_a_volume_or_an_error() {
    let (mut whole, mut unfinished) = (0, 0);
    for kills in 0..12_u64 {
        let place = Place::new(3);
        let mut child = child("child_makes", place.root.path()).spawn().expect("started");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        lines.map_while(std::io::Result::ok).find(|line| line == "begun").expect("it begins");
        let moment = Instant::now() + Duration::from_micros(kills * 1733 % 9000);
        while Instant::now() < moment {
            std::hint::spin_loop();
        }
        kill(&mut child);
        match place.open() {
            Ok(volume) => {
                assert_eq!(volume.step(), None);
                assert_says(&read(&volume, 0).expect_err("nothing"), &["never written"]);
                whole += 1;
            }
            Err(error) => {
                assert_says(&error, &["volume `v`", "member `"]);
                unfinished += 1;
            }
        }
    }
    assert_eq!(whole + unfinished, 12);
}

#[test]
fn a_forked_child_leaves_its_parents_volume_alone() {
    let place = Place::new(2);
    let volume = place.create(&SIZES, &Options { keep: false, ..kept() }).expect("made");
    write_all(&volume, 1).expect("written");
    volume.commit(1).expect("committed");
    // SAFETY: the child calls what the volume's drop does for one, which takes no locks that
    // another thread may hold, and ends at once.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let is_refused = volume.revert().is_err() && volume.commit(2).is_err();
        drop(volume);
        // SAFETY: ends the child without the parent's handlers.
        unsafe { libc::_exit(if is_refused { 7 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: a child of this process, and a place for its status.
    let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
    assert_eq!((waited, libc::WEXITSTATUS(status)), (pid, 7));
    assert_eq!(place.files().len(), 2, "still there");
    write_all(&volume, 2).expect("written");
    volume.commit(2).expect("committed");
    assert_is_step(&volume, 2);
    volume.close().expect("closed");
    assert!(place.files().is_empty());
}

fn assert_succeeds(test: &str) {
    let place = Place::new(3);
    let output = child(test, place.root.path()).output().expect("it ran");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

/// Trains a little on what the kernel offers.
fn assert_works(place: &Location, options: &Options) {
    let shape = Shape { stripe_bytes: STRIPE, ..Shape::new(SIZES.to_vec()) };
    let volume = Volume::create(place, &shape, options, &pool()).expect("made");
    for step in 1..3 {
        write_all(&volume, step).expect("written");
        volume.commit(step).expect("committed");
        assert_is_step(&volume, step);
    }
}

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
    assert_succeeds("child_has_no_io_uring");
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
    assert_succeeds("child_may_lock_little");
}

/// Folders on drives that take seconds for what is in flight, such as `a,b`. Each has room for
/// 64 MiB.
const SLOW_DRIVES: &str = "NVME_DIRS";

fn on_slow_drives(root: &Path) -> (Location, Shape) {
    let folders = fs::read_to_string(root.join("folders")).expect("their names");
    let folders: Vec<PathBuf> = folders.split(',').map(PathBuf::from).collect();
    let location = Location { name: "fence".to_owned(), folders };
    (location, Shape::new(vec![1 << 20; 16]))
}

/// Hands the drives a step and says so.
#[test]
#[ignore = "the other tests run it, in a process of its own"]
fn child_is_killed_with_writes_in_flight() {
    let Some(root) = child_root() else { return };
    let options = Options { num_buffers: 16, ..kept() };
    let engine = engines()[usize::from(std::env::var_os(CHILD_ENGINE).is_some())];
    let options = Options { engine, ..options };
    let (location, _) = on_slow_drives(&root);
    let volume = Volume::open(&location, &options, &pool()).expect("opened");
    let step = volume.step().map_or(1, |step| step + 1);
    let tickets: Vec<Ticket> =
        (0..16).map(|record| begin_write(&volume, record, step).expect("begun")).collect();
    say("submitted");
    tickets.into_iter().for_each(|ticket| drop(finish(ticket)));
}

/// VOL-4, where the kernel goes on writing for a process that is gone.
#[test]
#[ignore = "takes slow drives: folders on them in NVME_DIRS"]
fn nothing_of_a_killed_process_lands_once_the_volume_is_open() {
    let Ok(folders) = std::env::var(SLOW_DRIVES) else {
        eprintln!("skipped: {SLOW_DRIVES} names no folders");
        return;
    };
    let root = tempfile::tempdir().expect("a folder");
    fs::write(root.path().join("folders"), folders).expect("written");
    let (location, shape) = on_slow_drives(root.path());
    let options = Options { num_buffers: 16, ..kept() };
    drop(Volume::create(&location, &shape, &options, &pool()).expect("made"));
    let contents = || -> Vec<u64> {
        let read = |member| fs::read(member_path(&location, member)).expect("a member");
        let of = |bytes: &[u8]| {
            bytes.iter().fold(7_u64, |sum, &b| sum.wrapping_mul(0x0100_0000_01b3) ^ u64::from(b))
        };
        (0..location.folders.len()).map(|member| of(&read(member))).collect()
    };
    for engine in ["", "positional"] {
        let mut command = child("child_is_killed_with_writes_in_flight", root.path());
        if !engine.is_empty() {
            command.env(CHILD_ENGINE, engine);
        }
        let mut child = command.spawn().expect("started");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        lines.map_while(std::io::Result::ok).find(|line| line == "submitted").expect("it writes");
        child.kill().expect("alive");
        let begin = Instant::now();
        // What opening does first. The rest of it would queue behind those writes at the drive.
        let locked: Vec<File> = (0..location.folders.len())
            .map(|member| {
                let file = File::open(member_path(&location, member)).expect("a member");
                while rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
                    assert!(begin.elapsed() < SOON, "still locked");
                    std::thread::yield_now();
                }
                file
            })
            .collect();
        let waited = begin.elapsed();
        child.wait().expect("killed");
        let fenced = contents();
        // Long enough to see writes that land late: what is in flight takes seconds.
        std::thread::sleep(Duration::from_secs(3));
        assert!(contents() == fenced, "a write has landed after the lock was free");
        eprintln!("locked {waited:?} after the kill {engine}");
        drop(locked);
        let volume = Volume::open(&location, &options, &pool()).expect("fenced");
        assert_eq!(volume.step(), None);
    }
    let volume = Volume::open(&location, &Options { keep: false, ..options }, &pool());
    volume.expect("opened").close().expect("closed");
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Mounts of its own, which end with it.
#[test]
#[ignore = "the other tests run it, in a process of its own"]
fn child_mounts() {
    let Some(root) = child_root() else { return };
    let location = location_in(&root, 3);
    let mount = |folder: &Path, flags, data: &str| {
        let folder = std::ffi::CString::new(folder.to_str().expect("text")).expect("a path");
        let data = std::ffi::CString::new(data).expect("options");
        let tmpfs = c"tmpfs".as_ptr();
        // SAFETY: strings that end; nothing of this process lies in the folder.
        let done =
            unsafe { libc::mount(tmpfs, folder.as_ptr(), tmpfs, flags, data.as_ptr().cast()) };
        assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
    };
    let private = libc::MS_REC | libc::MS_PRIVATE;
    let none = std::ptr::null();
    // SAFETY: mounts of this process from here on, which no other one sees.
    unsafe {
        assert_eq!(libc::unshare(libc::CLONE_NEWNS), 0);
        assert_eq!(libc::mount(none, c"/".as_ptr(), none, private, none.cast()), 0);
    }
    let refused = || {
        let shape = Shape::new(vec![1 << 20; 8]);
        let error = Volume::create(&location, &shape, &kept(), &pool()).expect_err("refused");
        let left = |folder: &PathBuf| fs::read_dir(folder).expect("a folder").count();
        assert_eq!(location.folders.iter().map(left).sum::<usize>(), 0);
        error
    };
    mount(&location.folders[1], 0, "size=1m");
    let error = refused();
    assert_says(&error, &["volume `v`", "member `1`", "are free"]);
    assert_eq!(errno(&error), Some(Errno::NOSPC));
    mount(&location.folders[1], 0, "size=64m");
    assert_works(&location, &Options { keep: false, ..kept() });
    mount(&location.folders[1], libc::MS_RDONLY, "size=64m");
    let error = refused();
    assert_says(&error, &["volume `v`", "member `1`", "read-only"]);
    assert_eq!(errno(&error), Some(Errno::ROFS));
}

#[test]
fn a_full_or_read_only_file_system_is_an_error_that_names_the_member() {
    if !is_root() {
        eprintln!("skipped: it mounts file systems, which takes root");
        return;
    }
    assert_succeeds("child_mounts");
}
