//! Block devices as members: loop devices, which take root.

use std::os::unix::fs::OpenOptionsExt;

use stepwell::tier::volume::block_device;

use super::*;

/// A file as a block device.
struct Loop {
    path: PathBuf,
    image: PathBuf,
}

impl Loop {
    /// None: this process may not make them, which is said.
    fn new(image: PathBuf, nbytes: u64) -> Option<Self> {
        if !is_root() {
            eprintln!("skipped: it makes loop devices, which takes root");
            return None;
        }
        File::create(&image).and_then(|file| file.set_len(nbytes)).expect("an image");
        let made = Command::new("losetup").args(["--find", "--show"]).arg(&image).output();
        match made {
            Ok(made) if made.status.success() => {
                let path = String::from_utf8(made.stdout).expect("a path");
                Some(Self { path: PathBuf::from(path.trim()), image })
            }
            made => {
                eprintln!("skipped: losetup makes no device here ({made:?})");
                None
            }
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let device = File::open(&self.path).expect("a device");
        device.sync_all().expect("written");
        fs::read(&self.image).expect("an image")
    }

    fn write(&self, offset: u64, bytes: &[u8]) {
        let device = File::options().write(true).open(&self.path).expect("a device");
        device.write_all_at(bytes, offset).expect("written");
        device.sync_all().expect("written");
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.path).status();
    }
}

const DEVICE_BYTES: u64 = 16 << 20;

/// So many devices that are free, and a volume's location on them.
struct Devices {
    loops: Vec<Loop>,
    location: Location,
    root: TempDir,
}

impl Devices {
    fn new(num: usize) -> Option<Self> {
        let found = Self::unformatted(num)?;
        for each in &found.loops {
            block_device::format(&each.path, false).expect("it is blank");
        }
        Some(found)
    }

    fn unformatted(num: usize) -> Option<Self> {
        let root = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
        let root = root.expect("a folder");
        let loops: Option<Vec<Loop>> = (0..num)
            .map(|member| Loop::new(root.path().join(format!("{member}.img")), DEVICE_BYTES))
            .collect();
        let loops = loops?;
        let drives = loops.iter().map(|each| each.path.clone()).collect();
        Some(Self { loops, location: Location { name: "v".to_owned(), drives }, root })
    }

    fn create(&self) -> Result<Volume> {
        self.create_of(&SIZES)
    }

    fn create_of(&self, sizes: &[usize]) -> Result<Volume> {
        let shape = Shape { stripe_bytes: STRIPE, ..Shape::new(sizes.to_vec()) };
        Volume::create(&self.location, &shape, &quick(), &pool())
    }

    fn open(&self) -> Result<Volume> {
        Volume::open(&self.location, &quick(), &pool())
    }

    fn left_at_step_1(&self) {
        let volume = self.create().expect("made");
        write_all(&volume, 1).expect("written");
        volume.commit(1).expect("committed");
        volume.close().expect("closed");
    }
}

/// Waits long enough for the kernel to let go of a device, and not for ever.
fn quick() -> Options {
    Options { lock_timeout: Duration::from_secs(5), ..kept() }
}

#[test]
fn a_volume_on_devices_is_one_like_others() {
    let Some(mut devices) = Devices::new(2) else { return };
    // Beside a folder.
    let folder = devices.root.path().join("folder");
    fs::create_dir(&folder).expect("a folder");
    devices.location.drives.push(folder);
    for engine in engines() {
        let shape = Shape { stripe_bytes: STRIPE, ..Shape::new(SIZES.to_vec()) };
        let options = Options { engine, ..quick() };
        let volume =
            Volume::create(&devices.location, &shape, &options, &pool()).expect("a volume");
        assert_eq!(volume.paths()[..2], devices.location.drives[..2]);
        for step in 1..4 {
            write_all(&volume, step).expect("written");
            volume.commit(step).expect("committed");
            assert_is_step(&volume, step);
        }
        let me = format!("process `{}`", std::process::id());
        assert_says(&devices.open().expect_err("used"), &["member `0`", &me, "one job"]);
        assert_says(&devices.create().expect_err("used"), &["member `0`", &me, "one job"]);
        let format = |device| block_device::format(device, true).expect_err("used");
        assert_eq!(errno(&format(&devices.loops[1].path)), Some(Errno::BUSY));
        let found = found::list(&devices.loops[1].path).expect("read");
        assert_eq!((found.len(), found[0].name.as_str(), found[0].member), (1, "v", 1));
        assert!(found[0].holder.as_ref().is_some_and(|holder| holder.contains(&me)));
        volume.close().expect("closed");

        let volume = devices.open().expect("kept");
        assert_eq!(volume.step(), Some(3));
        assert_is_step(&volume, 3);
        assert!(volume.check(0..SIZES.len()).expect("read").is_empty());
        drop(volume);
        let removed = Volume::open(&devices.location, &Options { keep: false, ..quick() }, &pool());
        removed.expect("kept").close().expect("closed");
        assert!(found::list(&devices.loops[1].path).expect("read").is_empty(), "free");
    }
    // With nothing to keep, a device is free all the time.
    let shape = Shape { durability: Durability::None, ..Shape::new(SIZES.to_vec()) };
    let options = Options { keep: false, ..quick() };
    let volume = Volume::create(&devices.location, &shape, &options, &pool()).expect("a volume");
    write_all(&volume, 1).expect("written");
    assert_is_step(&volume, 1);
    assert!(found::list(&devices.loops[0].path).expect("read").is_empty());
}

/// DEV-1: whatever is there, of a file system, a partition table or anything else.
#[test]
fn what_is_on_a_device_is_left_alone() {
    let Some(devices) = Devices::unformatted(1) else { return };
    let [device] = &devices.loops[..] else { unreachable!("one") };
    let is_left = |expected: &[u8]| assert!(device.bytes() == expected, "it was changed");
    let blank = device.bytes();
    assert_says(&devices.create().expect_err("no label"), &["member `0`", "format"]);
    assert_says(&devices.open().expect_err("no label"), &["member `0`", "no member of a volume"]);
    is_left(&blank);
    for offset in [1080, 65_600, (4 << 20) - 1, DEVICE_BYTES - 512] {
        device.write(offset, &[0x53]);
        let before = device.bytes();
        devices.create().expect_err("no label");
        found::remove(&devices.location, Duration::ZERO).expect_err("not ours");
        let error = block_device::format(&device.path, false).expect_err("not empty");
        assert_says(&error, &["is not empty", "--overwrite"]);
        is_left(&before);
        device.write(offset, &[0]);
    }
    device.write(1080, &[0x53]);
    block_device::format(&device.path, true).expect("told to");
    devices.left_at_step_1();
    // Ours now, and of a name.
    let before = device.bytes();
    let error = block_device::format(&device.path, false).expect_err("a volume");
    assert_says(&error, &["member `0` of volume `v`"]);
    let other = Location { name: "w".to_owned(), ..devices.location.clone() };
    let shape = Shape::new(vec![10]);
    let error = Volume::create(&other, &shape, &quick(), &pool()).expect_err("another volume's");
    assert_says(&error, &["member `0` of volume `v`", "volume rm"]);
    let error = Volume::open(&other, &quick(), &pool()).expect_err("another volume's");
    assert_says(&error, &["member `0` of volume `v`"]);
    found::remove(&other, Duration::ZERO).expect_err("another volume's");
    is_left(&before);
    found::remove(&devices.location, SOON).expect("removed");
    devices.left_at_step_1();
    // A file is none.
    block_device::format(&device.image, true).expect_err("a file");
}

/// As who makes or removes a volume leaves them that is killed.
#[test]
fn devices_without_a_commit_make_room_and_others_do_not() {
    let Some(devices) = Devices::new(2) else { return };
    let is_absent = |location| found::is_absent(location, SOON).expect("nobody uses it");
    let other = Location { name: "w".to_owned(), ..devices.location.clone() };
    assert!(is_absent(&devices.location), "free");
    for has_commit in [false, true] {
        match has_commit {
            true => devices.left_at_step_1(),
            false => devices.create().expect("made").close().expect("closed"),
        }
        assert!(!is_absent(&devices.location), "all members are there");
        block_device::format(&devices.loops[1].path, true).expect("nobody uses it");
        let before = devices.loops[0].bytes();
        assert!(!is_absent(&other));
        assert_eq!(is_absent(&devices.location), !has_commit);
        assert_eq!(devices.loops[0].bytes() == before, has_commit);
        block_device::format(&devices.loops[0].path, true).expect("nobody uses it");
    }
}

/// A device that nothing else has as long as this is open. The kernel may have it for a moment
/// longer than what has let go of it, or made it.
fn claim(path: &Path) -> File {
    let begin = Instant::now();
    let excl = rustix::fs::OFlags::EXCL.bits().cast_signed();
    loop {
        match File::options().read(true).custom_flags(excl).open(path) {
            Ok(claimed) => return claimed,
            Err(error) => assert!(begin.elapsed() < SOON, "still claimed: {error}"),
        }
        std::thread::yield_now();
    }
}

/// DEV-2: a claim of the kernel's, whoever has it.
#[test]
fn a_device_that_is_used_or_mounted_is_refused() {
    let Some(devices) = Devices::new(1) else { return };
    let device = &devices.loops[0];
    let claimed = claim(&device.path);
    let options = Options { lock_timeout: Duration::from_millis(200), ..kept() };
    let shape = Shape::new(vec![10]);
    let create = || Volume::create(&devices.location, &shape, &options, &pool());
    assert_says(&create().expect_err("claimed"), &["member `0`", "is locked", "LVM"]);
    block_device::format(&device.path, true).expect_err("claimed");
    drop(claimed);
    drop(create().expect("free again"));
    drop(claim(&device.path));
    let Ok(made) = Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&device.path).status() else {
        eprintln!("skipped: the part with a file system, for which mkfs.ext4 is not there");
        return;
    };
    assert!(made.success());
    let at = devices.root.path().join("mounted");
    fs::create_dir(&at).expect("a folder");
    let mount = |command: &str, arguments: &[&Path]| {
        Command::new(command).args(arguments).status().expect("it ran").success()
    };
    assert!(mount("mount", &[&device.path, &at]));
    let errors = [
        create().expect_err("mounted"),
        devices.open().expect_err("mounted"),
        block_device::format(&device.path, true).expect_err("mounted"),
    ];
    assert!(mount("umount", &[&at]));
    for error in errors {
        assert_says(&error, &["mounted at", at.to_str().expect("text")]);
    }
    create().expect_err("a file system");
}

#[test]
fn a_device_that_is_too_small_is_named_and_stays_free() {
    let Some(devices) = Devices::new(2) else { return };
    let error = devices.create_of(&[1 << 20; 60]).expect_err("too small");
    assert_says(&error, &["volume `v`", "member `0`", &format!("`{DEVICE_BYTES}` are free")]);
    assert_eq!(errno(&error), Some(Errno::NOSPC));
    devices.left_at_step_1();
    // It has shrunk since.
    let volume = devices.open().expect("opened");
    drop(volume);
    let image = File::options().write(true).open(&devices.loops[1].image).expect("an image");
    image.set_len(64 << 12).expect("cut off");
    let grown = Command::new("losetup").arg("-c").arg(&devices.loops[1].path).status();
    assert!(grown.expect("it ran").success());
    assert_says(&devices.open().expect_err("cut off"), &["member `1`", "truncated"]);
}

/// DEV-3, at each point where a crash may come.
#[test]
fn what_a_crash_leaves_on_devices_is_whole_or_refused() {
    let Some(devices) = Devices::new(3) else { return };
    let label = devices.loops[0].bytes()[..64 << 10].to_vec();
    devices.left_at_step_1();
    let refused = || {
        assert_says(&devices.open().expect_err("unfinished"), &["never completely made"]);
        assert_says(&devices.create().expect_err("not free"), &["of volume `v`", "volume rm"]);
    };
    // While it is removed: the first copy of the first member is a label.
    devices.loops[0].write(0, &label);
    assert_is_step(&devices.open().expect("whole"), 1);
    assert_says(&devices.create().expect_err("not free"), &["of volume `v`", "volume rm"]);
    // Then all of it. The other way round it is one that was never completely made.
    devices.loops[0].write(64 << 10, &label);
    assert_says(&devices.open().expect_err("unfinished"), &["never completely made"]);
    found::remove(&devices.location, SOON).expect("the rest");
    devices.left_at_step_1();
    for copy in 0..2 {
        devices.loops[2].write(copy * (64 << 10), &label);
    }
    refused();
    found::remove(&devices.location, SOON).expect("the rest");
    let error = found::remove(&devices.location, SOON).expect_err("all are free");
    assert_says(&error, &["none of its members"]);
    devices.left_at_step_1();
}

/// Trains until it is killed.
#[test]
#[ignore = "the other tests run it, in a process of its own"]
fn child_trains_on_devices() {
    let Some(root) = child_root() else { return };
    let drives = fs::read_to_string(root.join("devices")).expect("their paths");
    let drives = drives.lines().map(PathBuf::from).collect();
    let location = Location { name: "v".to_owned(), drives };
    let volume = Volume::open(&location, &quick(), &pool()).expect("opened");
    say("");
    for step in volume.step().expect("a committed step") + 1.. {
        write_all(&volume, step).expect("written");
        volume.commit(step).expect("committed");
        say(&format!("step {step}"));
    }
}

#[test]
fn a_kill_leaves_a_committed_step_on_devices() {
    let Some(devices) = Devices::new(2) else { return };
    devices.left_at_step_1();
    let drives: Vec<&str> =
        devices.loops.iter().map(|each| each.path.to_str().expect("text")).collect();
    fs::write(devices.root.path().join("devices"), drives.join("\n")).expect("written");
    for kills in 0..8_u64 {
        let test = "block_devices::child_trains_on_devices";
        let mut child = child(test, devices.root.path()).spawn().expect("started");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let mut steps = lines.map_while(std::io::Result::ok).filter_map(|line| {
            line.strip_prefix("step ").map(|step| step.parse::<u64>().expect("a number"))
        });
        let mut acknowledged = steps.nth(kills as usize % 3).expect("it trains");
        let moment = Instant::now() + Duration::from_micros(kills * 7919 % 6000);
        while Instant::now() < moment {
            std::hint::spin_loop();
        }
        kill(&mut child);
        steps.for_each(|step| acknowledged = step);
        let volume = devices.open().expect("a committed step");
        let found = volume.step().expect("a committed step");
        assert!(found == acknowledged || found == acknowledged + 1);
        assert_is_step(&volume, found);
    }
}
