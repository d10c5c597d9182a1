//! Reading pages.

use std::time::Instant;

use kvdock_plugin_api::{Batch, Get, Result};

use super::Store;
use super::items::Use;
use super::session::Session;

impl Store {
    /// Reads the pages of a batch.
    pub fn get(&self, batch: &Batch<'_, Get>) -> Result<()> {
        let began = Instant::now();
        let result = self.get_pages(batch);
        self.figures.get_done(began, result.is_ok());
        result
    }

    fn get_pages(&self, batch: &Batch<'_, Get>) -> Result<()> {
        let call = *batch.call();
        call.check()?;
        let items = self.items(batch.transfers(), Use::Read)?;
        if items.pages() == 0 {
            return Ok(());
        }
        let limit = Store::limit(&call);
        let mut session = Session::start(self, &items, &limit)?;
        session.read_step(0, &limit);
        session.end(&limit);
        items.settle();
        call.check()
    }
}
