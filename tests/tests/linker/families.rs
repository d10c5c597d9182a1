//! Every model family in a running server, with the file plugin.

use kvdock_tests::server::Launch;

use super::model::{Model, PAGES};

#[test]
fn every_family_comes_from_storage_layer_by_layer_with_the_same_answer() {
    for name in Model::NAMES {
        let (model, storage) = (Model::write(name), tempfile::tempdir().unwrap());
        let launch = model.served_by(Launch::linked()).storage(storage.path());
        let prompt = model.prompt("linked", PAGES * model.page + 5);
        let server = launch.start();
        let (cold, usage) = server.client().generate(&prompt, 6);
        assert_eq!(usage.cached(), 0, "{name}: {usage:?}");
        let (warm, usage) = server.client().generate(&prompt, 6);
        assert_eq!((usage.device, &warm), (model.tokens(PAGES), &cold), "{name}: {usage:?}");
        server.stop();

        let server = launch.start();
        let client = server.client();
        let (stored, usage) = client.generate(&prompt, 6);
        assert_eq!((usage.storage, &stored), (model.tokens(PAGES), &cold), "{name}: {usage:?}");
        let (again, usage) = client.generate(&prompt, 6);
        assert_eq!((usage.device, &again), (model.tokens(PAGES), &cold), "{name}: {usage:?}");
        server.stop();
    }
}
