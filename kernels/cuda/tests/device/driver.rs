//! That the fake driver finds what is wrong: each fault that a program could have, planted by hand.

use kvdock_cuda::driver::{Access, Arg, Driver, Event, Launch, Stream, Touch, Touches, nothing_more};

use super::fake::Fake;

struct Two {
    fake: Fake,
    first: Stream,
    second: Stream,
    event: Event,
    device: u64,
    host: *mut u8,
}

const BYTES: usize = 64;

fn two() -> Two {
    let fake = Fake::new();
    let (first, second) = (fake.stream(false).unwrap(), fake.stream(true).unwrap());
    let event = fake.event(false).unwrap();
    let (device, host) = (fake.alloc(BYTES).unwrap(), fake.alloc_host(BYTES).unwrap());
    Two { fake, first, second, event, device, host }
}

impl Two {
    fn up(&self, stream: Stream) {
        // SAFETY: both are as long, and live as long as the driver keeps them.
        unsafe { self.fake.to_device(self.device, self.host, BYTES, stream).unwrap() }
    }

    fn down(&self, stream: Stream) {
        // SAFETY: as above.
        unsafe { self.fake.to_host(self.host, self.device, BYTES, stream).unwrap() }
    }

    fn touch(&self, access: Access) {
        self.fake.host_access(Touch { at: self.host as u64, len: 1, access });
    }

    fn found(&self, word: &str) {
        let violations = self.fake.violations();
        assert!(violations.iter().any(|text| text.contains(word)), "{word:?} is not among {violations:?}");
    }

    fn nothing(&self) {
        assert_eq!(self.fake.violations(), Vec::<String>::new());
    }
}

#[test]
fn ordered_work_is_fine() {
    let two = two();
    two.touch(Access::Write);
    two.up(two.first);
    two.fake.record(two.event, two.first).unwrap();
    two.fake.wait(two.second, two.event).unwrap();
    two.down(two.second);
    two.fake.synchronize(two.second).unwrap();
    two.touch(Access::Read);
    // What the second stream waited for has run, too.
    two.touch(Access::Write);
    // SAFETY: nothing uses them any more.
    unsafe {
        two.fake.free(two.device).unwrap();
        two.fake.free_host(two.host).unwrap();
    }
    two.nothing();
    assert_eq!(two.fake.kept(), (0, 0));
}

#[test]
fn host_memory_that_is_used_before_the_copy_ended_is_found() {
    let one = two();
    one.up(one.first);
    // Reading beside the device's reading is fine.
    one.touch(Access::Read);
    one.nothing();
    one.touch(Access::Write);
    one.found("this process writes what to_device may still use");

    let other = two();
    other.down(other.first);
    other.touch(Access::Read);
    other.found("this process reads what to_host may still use");

    let third = two();
    third.up(third.first);
    // SAFETY: not safe with a real driver, which is the point; the fake keeps the memory.
    unsafe { third.fake.free_host(third.host).unwrap() };
    third.found("free_host: to_device may still run");
}

#[test]
fn streams_that_do_not_wait_for_each_other_are_found() {
    let one = two();
    one.up(one.first);
    one.down(one.second);
    one.found("to_host is not ordered behind to_device");

    // The event marks what was queued before it was recorded, and not what came after.
    let other = two();
    other.fake.record(other.event, other.first).unwrap();
    other.up(other.first);
    other.fake.wait(other.second, other.event).unwrap();
    other.down(other.second);
    other.found("to_host is not ordered behind to_device");
}

#[test]
fn events_that_were_never_recorded_are_found() {
    let two = two();
    two.fake.wait(two.first, two.event).unwrap();
    two.found("never recorded");
}

#[test]
fn memory_that_is_gone_or_too_short_is_found() {
    let one = two();
    // SAFETY: the fake looks before it copies.
    unsafe { one.fake.fill(one.device, 0, BYTES + 1, one.first).unwrap() };
    one.found("outside of any memory");

    let other = two();
    // SAFETY: the fake keeps the memory.
    unsafe { other.fake.free(other.device).unwrap() };
    other.up(other.first);
    other.found("after it was given back");
    // SAFETY: as above.
    unsafe { other.fake.free(other.device).unwrap() };
    other.found("no such memory");
}

#[test]
fn kernels_are_known_by_what_they_touch() {
    let two = two();
    let module = two.fake.load(&[]).unwrap();
    let kernel = two.fake.function(module, "k").unwrap();
    let launch = |args: &[Arg], touches: &Touches<'_>, stream| {
        let launch = Launch { grid: [1; 3], block: [32, 1, 1], shared: 0, args, touches };
        // SAFETY: the fake runs nothing of this module.
        unsafe { two.fake.launch(kernel, &launch, stream).unwrap() }
    };
    launch(&[Arg::read(two.device, 32)], &nothing_more, two.first);
    launch(&[Arg::read(two.device, 32)], &nothing_more, two.second);
    launch(&[Arg::write(two.device + 32, 32)], &nothing_more, two.second);
    two.nothing();
    let page = Touch { at: two.device + 40, len: 4, access: Access::Read };
    launch(&[Arg::Address(two.device)], &|tell| tell(page), two.first);
    two.found("k is not ordered behind k");
}

#[test]
fn recordings_hold_no_host_memory_and_are_nobody_elses() {
    let two = two();
    two.fake.begin_capture(two.first).unwrap();
    // SAFETY: the range is valid.
    unsafe { two.fake.fill(two.device, 1, BYTES, two.first).unwrap() };
    two.nothing();
    two.up(two.first);
    two.found("with host memory was recorded");
    two.fake.synchronize(two.first).unwrap();
    two.found("synchronize of a stream that records");
    std::thread::scope(|scope| {
        let (fake, device, stream) = (&two.fake, two.device, two.first);
        // SAFETY: the range is valid.
        scope.spawn(move || unsafe { fake.fill(device, 2, BYTES, stream).unwrap() });
    });
    two.found("of another thread got into a recording");
    two.fake.end_capture(two.first).unwrap();
}

#[test]
fn a_recording_runs_each_time_it_is_launched() {
    let two = two();
    two.fake.begin_capture(two.first).unwrap();
    // SAFETY: the range is valid.
    unsafe { two.fake.fill(two.device, 0x2A, BYTES, two.first).unwrap() };
    let graph = two.fake.end_capture(two.first).unwrap();
    let bytes = || {
        two.down(two.first);
        two.fake.synchronize(two.first).unwrap();
        // SAFETY: the copy has run.
        unsafe { *two.host }
    };
    assert_eq!(bytes(), 0xFF, "nothing runs while it is recorded");
    // SAFETY: the memory is there.
    unsafe { two.fake.launch_graph(graph, two.first).unwrap() };
    assert_eq!(bytes(), 0x2A);
    // SAFETY: as above.
    unsafe {
        two.fake.launch_graph(graph, two.first).unwrap();
        two.nothing();
        two.fake.launch_graph(graph, two.second).unwrap();
    }
    two.found("fill is not ordered behind fill");
}
