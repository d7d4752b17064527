//! A power cut, on drives with volatile caches.

use super::*;

/// What a program does with a volume until the power goes.
fn train_until_cut(place: &Place, power: &std::sync::Arc<Power>, flush_bytes: u64) -> Option<u64> {
    let between = power.between(|member| member_path(&place.location, member.min(1)));
    let options = Options { between, flush_bytes, ..kept() };
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
        flush_bytes in prop::sample::select(vec![1, 100_000, u64::MAX]),
    ) {
        let place = Place::in_memory(2);
        left_at_step_1(&place);
        let mut acknowledged = 1;
        for (calls, seed) in cuts {
            let power = Power::new(calls);
            acknowledged = train_until_cut(&place, &power, flush_bytes).unwrap_or(acknowledged);
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

    /// CMT-5: while a volume goes back by one step.
    #[test]
    fn a_power_cut_while_a_volume_goes_back_leaves_both_ways(
        cuts in prop::collection::vec((0_usize..12, any::<u64>()), 1..4),
    ) {
        let place = Place::in_memory(2);
        left_at_step_1(&place);
        let volume = place.open().expect("opened");
        write_all(&volume, 2).expect("written");
        volume.commit(2).expect("committed");
        drop(volume);
        for (calls, seed) in cuts {
            let power = Power::new(calls);
            let between = power.between(|member| member_path(&place.location, member.min(1)));
            drop(place.open_with(&Options { between, step: Some(1), ..kept() }));
            let mut random = seed;
            power.leave_behind(|num| {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (random >> 33) as usize % num
            });
        }
        {
            let volume = place.open().expect("a committed step");
            assert_is_step(&volume, volume.step().expect("a committed step"));
        }
        let volume = place.open_with(&Options { step: Some(1), ..kept() }).expect("the step");
        assert_is_step(&volume, 1);
        write_all(&volume, 2).expect("written");
        volume.commit(2).expect("committed");
        assert_is_step(&volume, 2);
    }
}
