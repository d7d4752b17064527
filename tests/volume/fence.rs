//! Writes of a killed process, on slow drives.

use super::*;

/// Folders on drives that take seconds for what is in flight, such as `a,b`. Each has room for
/// 64 MiB.
const SLOW_DRIVES: &str = "NVME_DIRS";

fn on_slow_drives(root: &Path) -> (Location, Shape) {
    let folders = fs::read_to_string(root.join("folders")).expect("their names");
    let drives: Vec<PathBuf> = folders.split(',').map(PathBuf::from).collect();
    let location = Location { name: "fence".to_owned(), drives };
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
        (0..location.drives.len()).map(|member| of(&read(member))).collect()
    };
    for engine in ["", "positional"] {
        let mut command = child("fence::child_is_killed_with_writes_in_flight", root.path());
        if !engine.is_empty() {
            command.env(CHILD_ENGINE, engine);
        }
        let mut child = command.spawn().expect("started");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        lines.map_while(std::io::Result::ok).find(|line| line == "submitted").expect("it writes");
        child.kill().expect("alive");
        let begin = Instant::now();
        // What opening does first. The rest of it would queue behind those writes at the drive.
        let locked: Vec<File> = (0..location.drives.len())
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
