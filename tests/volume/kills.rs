//! Two jobs, forked children, and processes that are killed.

use super::*;

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

/// VOL-1 and VOL-4, with real processes.
#[test]
fn a_kill_at_any_moment_leaves_a_committed_step() {
    const KILLS: u64 = 50;
    let place = Place::new(3);
    left_at_step_1(&place);
    let mut step = 1;
    for kills in 0..KILLS {
        let mut command = child("kills::child_trains", place.root.path());
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
fn a_kill_while_a_volume_is_made_or_removed_leaves_one_to_begin_with() {
    for kills in 0..12_u64 {
        let place = Place::new(3);
        let mut child = child("kills::child_makes", place.root.path()).spawn().expect("started");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        lines.map_while(std::io::Result::ok).find(|line| line == "begun").expect("it begins");
        let moment = Instant::now() + Duration::from_micros(kills * 1733 % 9000);
        while Instant::now() < moment {
            std::hint::spin_loop();
        }
        kill(&mut child);
        assert_begins(&place);
    }
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
