//! Full and read-only file systems.

use super::*;

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
        assert_eq!(location.drives.iter().map(left).sum::<usize>(), 0);
        error
    };
    mount(&location.drives[1], 0, "size=1m");
    let error = refused();
    assert_says(&error, &["volume `v`", "member `1`", "are free"]);
    assert_eq!(errno(&error), Some(Errno::NOSPC));
    mount(&location.drives[1], 0, "size=64m");
    assert_works(&location, &Options { keep: false, ..kept() });
    mount(&location.drives[1], libc::MS_RDONLY, "size=64m");
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
    assert_succeeds("file_systems::child_mounts");
}
