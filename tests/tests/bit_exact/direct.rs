//! Pages straight between a GPU and a plugin that takes its memory. The GPU's kernels run on the CPU, so its memory is this process's, and the
//! plugin of `tests/broken` reaches it.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvdock::plugin::backend::PoolGroup;
use kvdock_tests::broken::Broken;

use super::faults::{Fault, Ordered};
use super::gpu::{Gpu, NEW, PAGES};
use super::rig::{Rig, Run, Setup, Tier};

/// What the plugin is that takes a GPU's memory.
const TAKES: &str = "device_memory";

/// A folder with a plugin called `device`: this kind of the one for tests, whose note says that instances may take a GPU's memory.
fn plugin(kind: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let plugin = Broken::new().fault(kind).name("device");
    plugin.note(|note| note["capabilities"]["cuda_memory"] = true.into()).write(folder.path());
    folder
}

/// An engine in linker mode over a plugin, with pages in a folder.
struct Place {
    plugin: tempfile::TempDir,
    storage: tempfile::TempDir,
}

impl Place {
    fn of(kind: &str) -> Self {
        Self { plugin: plugin(kind), storage: tempfile::tempdir().unwrap() }
    }

    fn setup(&self) -> Setup<'_> {
        let plugin = Some((self.plugin.path(), "device"));
        Setup { chunk: 4096, folder: Some(self.storage.path()), linked: true, plugin, ..Setup::default() }
    }

    /// Computes the prompt and stores it.
    fn fill(&self, gpu: &Gpu, prompt: &[u32]) -> Run {
        let rig = gpu.start(self.setup());
        let cold = rig.run("cold", prompt, NEW, None);
        cold.came_from(Tier::Nowhere, 0);
        rig.wait_written();
        rig.stop();
        cold
    }
}

/// So many tokens come from storage, and the logits are those of `cold`.
fn comes(gpu: &Gpu, rig: &Rig, cold: &Run, prompt: &[u32], pages: usize) {
    let run = rig.run("from storage", prompt, NEW, None);
    run.came_from(if pages == 0 { Tier::Nowhere } else { Tier::Storage }, gpu.tokens(pages));
    cold.rows.must_equal(&run.rows, "from storage");
}

fn copies(gpu: &Gpu) -> (usize, usize) {
    (gpu.launched("kv_pages_out"), gpu.launched("kv_pages_in"))
}

#[test]
fn pages_go_straight_between_a_gpu_and_a_plugin() {
    for gpu in [Gpu::new(), Gpu::family("gpt_oss", 4)] {
        let place = Place::of(TAKES);
        let prompt = gpu.prompt("prompt");
        let cold = place.fill(&gpu, &prompt);
        assert!(gpu.launched("seal_checksums") > 0, "seals hold the device's checksums");
        let rig = gpu.start(place.setup());
        let before = gpu.launched("seal_checksums");
        comes(&gpu, &rig, &cold, &prompt, PAGES);
        assert!(gpu.launched("seal_checksums") > before, "what has come is verified by the device's checksums");
        // Loaded, and from the device, beside others.
        let company = rig.run_in_company("company", &prompt, NEW, None);
        cold.rows.must_equal(&company.rows, "in company");
        rig.assert_quiet();
        rig.stop();
        assert_eq!(copies(&gpu), (0, 0), "nothing goes by way of the host");
        gpu.is_sound();
    }
}

/// The same plugin, where it takes no such memory: by its note, or by what an instance says of itself.
#[test]
fn pages_go_by_way_of_the_host_where_a_plugin_takes_no_memory_of_a_gpu() {
    let gpu = Gpu::new();
    let prompt = gpu.prompt("prompt");
    let place = Place::of("none");
    let cold = place.fill(&gpu, &prompt);
    let rig = gpu.start(place.setup());
    comes(&gpu, &rig, &cold, &prompt, PAGES);
    rig.assert_quiet();
    rig.stop();
    assert_eq!(copies(&gpu).1, 2, "one launch a layer for all pages");
    assert!(copies(&gpu).0 > 0);
    // Pages of the device have their bytes in another order, so they are other pages.
    let takes = Place { plugin: plugin(TAKES), storage: place.storage };
    let rig = gpu.start(takes.setup());
    comes(&gpu, &rig, &cold, &prompt, 0);
    rig.wait_written();
    rig.empty_device();
    comes(&gpu, &rig, &cold, &prompt, PAGES);
    rig.stop();
    gpu.is_sound();
}

#[test]
fn what_comes_straight_and_wrong_is_computed() {
    use Fault::{Changed, FailsAt, Missing, Short};
    let gpu = Gpu::new();
    let prompt = gpu.prompt("prompt");
    for (fault, page, good) in [(Changed("kv"), 2, 2), (Missing, 1, 1), (Short, 3, 3), (FailsAt(1), 0, 0)] {
        let place = Place::of(TAKES);
        let cold = place.fill(&gpu, &prompt);
        let ordered = Ordered::new(PoolGroup::Full, page, fault);
        let over = ordered.clone();
        let rig = gpu.start_over(place.setup(), move |inner, pools| over.over(inner, pools));
        comes(&gpu, &rig, &cold, &prompt, good);
        assert!(ordered.met.load(Ordering::SeqCst) > 0, "{fault:?}");
        rig.assert_quiet();
        rig.stop();
    }
    assert_eq!(copies(&gpu), (0, 0));
    gpu.is_sound();
}

/// A driver's error while what came is looked at: the pages are computed, and nothing is held against the store.
#[test]
fn what_can_t_be_verified_is_computed_and_stays_stored() {
    let gpu = Gpu::new();
    let prompt = gpu.prompt("prompt");
    let place = Place::of(TAKES);
    let cold = place.fill(&gpu, &prompt);
    let ordered = Ordered::new(PoolGroup::Full, 0, Fault::Waits);
    ordered.hold.store(true, Ordering::SeqCst);
    let over = ordered.clone();
    let rig = gpu.start_over(place.setup(), move |inner, pools| over.over(inner, pools));
    let stream = rig.submit("unlucky", &prompt, NEW, None);
    ordered.wait_met();
    // The next copy to the host is that of the checksums: the request waits for its first layer.
    gpu.fake.fail_next("to_host");
    ordered.hold.store(false, Ordering::SeqCst);
    let run = rig.finish("unlucky", stream, prompt.len(), NEW);
    cold.rows.must_equal(&run.rows, "computed");
    rig.assert_quiet();
    rig.stop();
    let rig = gpu.start(place.setup());
    comes(&gpu, &rig, &cold, &prompt, PAGES);
    rig.stop();
    gpu.is_sound();
}

/// A load that does not return keeps its slots, also when its backend leaves; the pool stays when everything else is gone. What is written late harms
/// nobody.
#[test]
fn a_load_that_does_not_return_keeps_the_memory_of_the_gpu() {
    let gpu = Gpu::new();
    let prompt = gpu.prompt("prompt");
    let place = Place::of("device_memory_waits");
    let cold = place.fill(&gpu, &prompt);
    let hold = place.storage.path().join("hold");
    std::fs::write(&hold, "").unwrap();
    let before = gpu.fake.kept().0;
    let rig = gpu.start(Setup { timeout: Duration::from_millis(300), ..place.setup() });
    let pool = gpu.fake.kept().0 - before;
    assert!(pool > 0);
    comes(&gpu, &rig, &cold, &prompt, 0);
    // Its slots are given to nobody, however many others want some.
    for other in 0..6 {
        let prompt = gpu.prompt(&format!("other {other}"));
        let run = rig.run(&format!("other {other}"), &prompt, NEW, None);
        assert_eq!(run.tokens.len(), NEW as usize);
        rig.check_integrity();
    }
    let said = rig.detach();
    assert!(said.contains("can't be closed"), "{said}");
    let run = rig.run("after it left", &prompt, NEW, None);
    cold.rows.must_equal(&run.rows, "after the backend left");
    let with_all = gpu.fake.kept().0;
    rig.leave();
    assert!(gpu.fake.kept().0 >= before + pool, "{} of {with_all} bytes are left", gpu.fake.kept().0);
    std::fs::remove_file(&hold).unwrap();
    gpu.is_sound();
    // A plugin that is closed lets go of it.
    let before = gpu.fake.kept().0;
    let rig = gpu.start(place.setup());
    comes(&gpu, &rig, &cold, &prompt, PAGES);
    let with_all = gpu.fake.kept().0;
    rig.stop();
    // It is closed by a thread of its own.
    let until = Instant::now() + Duration::from_secs(30);
    while gpu.fake.kept().0 > with_all - pool {
        assert!(Instant::now() < until, "{before}, {with_all}, {}", gpu.fake.kept().0);
        std::thread::sleep(Duration::from_millis(10));
    }
}
