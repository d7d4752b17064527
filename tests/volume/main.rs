//! Volumes: what was written is read, whatever the drives, the kernel and other processes do, or
//! there is an error that says where.

#[path = "../drives/mod.rs"]
mod drives;

mod block_devices;
mod failing_drives;
mod fence;
mod file_systems;
mod kernel;
mod kills;
mod members;
mod power;
mod records;

use std::{
    fs::{self, File},
    io::{BufRead, BufReader, Write},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use drives::{Call, Drives, Effect, Power, SOON, engines};
use proptest::prelude::*;
use rustix::{fs::FlockOperation, io::Errno};
use stepwell::{
    Error, Result,
    host::pool::{Pool, PoolConfig},
    tier::volume::{
        Durability, EngineKind, Location, Options, RecordBuffer, Shape, Ticket, Volume, found,
        unique_name,
    },
};
use tempfile::TempDir;

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
        location.drives.iter().for_each(|folder| fs::create_dir(folder).expect("a folder"));
        Self { root, location }
    }

    fn member(&self, member: usize) -> PathBuf {
        member_path(&self.location, member)
    }

    /// Names of all files in the folders.
    fn files(&self) -> Vec<String> {
        let entries = self.location.drives.iter().flat_map(|folder| {
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
    let drives = (0..num_members).map(|member| root.join(format!("drive{member}"))).collect();
    Location { name: "v".to_owned(), drives }
}

fn member_path(location: &Location, member: usize) -> PathBuf {
    location.drives[member].join(format!("{}.{member}.stepwell", location.name))
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

/// What is left of a volume without a commit is one to begin with, or makes room for one.
fn assert_begins(place: &Place) {
    let is_absent = found::is_absent(&place.location, SOON).expect("nobody uses it");
    assert!(!is_absent || place.files().is_empty());
    let made = if is_absent { place.create(&SIZES, &kept()) } else { place.open() };
    let volume = made.expect("made, or whole");
    assert_eq!(volume.step(), None);
    assert_says(&read(&volume, 0).expect_err("nothing"), &["never written"]);
    write_all(&volume, 1).expect("written");
    volume.commit(1).expect("committed");
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

// ---- other processes ---------------------------------------------------------------------------

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

fn kill(child: &mut Child) {
    child.kill().expect("alive");
    child.wait().expect("killed");
}

fn assert_succeeds(test: &str) {
    let place = Place::new(3);
    let output = child(test, place.root.path()).output().expect("it ran");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
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

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}
