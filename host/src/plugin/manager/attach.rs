//! Bringing a backend in.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use super::super::admin::{AdminError, AttachMode, AttachRequest};
use super::super::backend::PolicyChange;
use super::super::discover::find_with;
use super::super::inspect::PluginInfo;
use super::super::open::{OpenRequest, Opened, open};
use super::super::state::{BackendState, StateCell};
use super::board::Board;
use super::detach::CLOSE_TIMEOUT;
use super::member::Member;
use super::{Shared, lock};
use crate::config::{BackendTable, host_keys_in};

/// How long an attach waits for the end of what it replaced, so that its answer can tell of it.
const REPORT_TIMEOUT: Duration = Duration::from_secs(1);

/// How an attach went.
pub(super) type Answer = Result<Arrival, Refused>;

/// A backend that is in use now.
pub(super) struct Arrival {
    pub member: Arc<Member>,
    /// What it replaced.
    pub replaced: Option<Arc<Member>>,
}

/// Why a backend did not come in.
pub(super) struct Refused {
    pub error: AdminError,
    /// What tells of it, if its attach began.
    pub member: Option<Arc<Member>>,
}

/// A place among the attaches, held while the plugin is looked for.
struct Search<'a> {
    shared: &'a Shared,
    name: &'a str,
}

impl<'a> Search<'a> {
    fn take(shared: &'a Shared, name: &'a str) -> Result<Self, String> {
        let mut board = lock(&shared.board);
        board.check_room(&board.sought)?;
        board.sought.push(name.to_owned());
        Ok(Self { shared, name })
    }
}

impl Drop for Search<'_> {
    fn drop(&mut self) {
        let sought = &mut lock(&self.shared.board).sought;
        if let Some(at) = sought.iter().position(|name| name == self.name) {
            sought.swap_remove(at);
        }
    }
}

impl Shared {
    pub fn attach(self: &Arc<Self>, request: AttachRequest) -> Result<String, AdminError> {
        let name = request.backend;
        let table = self.config.table(&name);
        let mut table = match &request.config {
            Some(over) => table.overlaid(over).map_err(AdminError::new)?,
            None => table,
        };
        let mut change =
            PolicyChange { prefetch: request.prefetch_policy, write: request.write_policy, ..PolicyChange::default() };
        let plugin = self.seek(&name, &table.plugin).map_err(AdminError::new)?;
        change.take_from(&mut table.own, &plugin.note.config_schema).map_err(AdminError::new)?;
        self.sink.check_policies(&change).map_err(AdminError::new)?;
        let arrival = self.bring_in(table, &request.mode, &change).map_err(|refused| refused.error)?;
        let mut text = format!("{name} (version {}) is attached.", arrival.member.version());
        if let Some(replaced) = arrival.replaced {
            text.push_str(&format!(" It replaces {}", replaced.name));
            text.push_str(match replaced.wait_end_within(REPORT_TIMEOUT) {
                Some(true) => ".",
                Some(false) => ", which can't be closed because a call into it does not return.",
                None => ", which still drains.",
            });
        }
        Ok(text)
    }

    /// Finds the plugin for a backend. That reads whole files, so what has no place among the attaches is refused first.
    fn seek(&self, name: &str, plugin: &str) -> Result<PluginInfo, String> {
        let _search = Search::take(self, name)?;
        find_with(self.abi, plugin, &self.folders)
    }

    /// Opens a backend beside what is there and switches it in. When it is refused, nothing has changed. An attach that is called off answers at
    /// once; what the plugin does until then is undone when it returns.
    pub fn bring_in(self: &Arc<Self>, table: BackendTable, mode: &AttachMode, change: &PolicyChange) -> Answer {
        let pools = self.sink.rank_pools();
        let refuse = |error: &str| Refused { error: AdminError::new(error), member: None };
        if pools.is_empty() {
            return Err(refuse(
                "there is no host pool to move pages through: set cache.host_tokens above 0 and cache.mode = \"hierarchical\"",
            ));
        }
        if pools.len() != self.identity.ranks() as usize {
            let (pools, ranks) = (pools.len(), self.identity.ranks());
            return Err(refuse(&format!("there are host pools of {pools} ranks, but the model has {ranks}")));
        }
        let member =
            self.announce(&table, mode).map_err(|error| Refused { error: AdminError::new(error), member: None })?;
        let request = OpenRequest {
            abi: self.abi,
            config: table,
            folders: self.folders.clone(),
            identity: self.identity.clone(),
            pools: pools.into_iter().map(Arc::from).collect(),
            device: self.sink.device_pools(),
            mode: self.sink.cache_mode(),
            state: member.state.clone(),
            calls: member.calls.clone(),
        };
        let answered = member.expect_answer();
        let work = {
            let (shared, member, mode, change) = (self.clone(), member.clone(), mode.clone(), change.clone());
            move || {
                let ready = AssertUnwindSafe(|| shared.open_and_switch(&member, &request, &mode, &change));
                let panicked = |_| Err(shared.turn_away(&member, "its attach panicked; the log says where"));
                member.answer(catch_unwind(ready).unwrap_or_else(panicked));
            }
        };
        let gone = match thread::Builder::new().name("kv-attach".into()).spawn(work) {
            Ok(_) => match answered.recv() {
                Ok(answer) => return answer,
                Err(_) => "its attach ended without an answer".to_owned(),
            },
            Err(error) => format!("no thread to open it with: {error}"),
        };
        Err(self.turn_away(&member, &format!("storage backend {}: {gone}", member.name)))
    }

    fn open_and_switch(
        self: &Arc<Self>,
        member: &Arc<Member>,
        request: &OpenRequest,
        mode: &AttachMode,
        change: &PolicyChange,
    ) -> Answer {
        let ready = open(request).and_then(|opened| {
            let schema = &opened.instance.library().info.note.config_schema;
            for key in host_keys_in(schema) {
                tracing::warn!(
                    backend = %member.name,
                    key,
                    "the plugin's schema declares a key that is the host's; the plugin never sees its value"
                );
            }
            self.hear_of_losses(&member.name, &opened);
            member.set_opened(opened);
            self.switch_in(member, mode, change)
        });
        match ready {
            Ok(replaced) => {
                if let Some(replaced) = &replaced {
                    self.retire(replaced, false, &format!("replaced by {}", member.name));
                }
                Ok(Arrival { member: member.clone(), replaced })
            }
            Err(error) => Err(self.turn_away(member, &error)),
        }
    }

    /// When the plugin tells that its store has lost what it held, nothing is believed to be there any more, and what the host holds is offered
    /// to it again.
    fn hear_of_losses(self: &Arc<Self>, name: &str, opened: &Opened) {
        let (shared, name) = (Arc::downgrade(self), name.to_owned());
        let heard = Arc::new(move || {
            if let Some(shared) = shared.upgrade() {
                tracing::info!(backend = %name, "what the store held is gone; it is offered what the host holds");
                shared.sink.emptied(&name);
            }
        });
        for context in opened.instance.contexts() {
            let heard = heard.clone();
            context.listen_for_losses(Some(Box::new(move || heard())));
        }
    }

    /// Shows that a backend is being opened.
    fn announce(self: &Arc<Self>, table: &BackendTable, mode: &AttachMode) -> Result<Arc<Member>, String> {
        let name = &table.name;
        let (shared, counted) = (Arc::downgrade(self), name.clone());
        let on_change = move |state| {
            if let Some(shared) = shared.upgrade() {
                shared.count(&counted, state);
                if state == BackendState::Failed {
                    shared.sweep_soon();
                }
            }
        };
        let state = StateCell::new(name, Box::new(on_change));
        let member = Member::new(name, &table.plugin, table.settings.clone(), state);
        let mut board = lock(&self.board);
        // Refused here already if it is clear that there is no place for it.
        board.plan(name, mode, member.ticket(), self.rank(name))?;
        board.check_room(&[])?;
        board.coming.push(member.clone());
        drop(board);
        self.count(name, BackendState::Loading);
        Ok(member)
    }

    /// Place of a name by the configuration's list.
    fn rank(&self, name: &str) -> usize {
        self.config.selected().iter().position(|listed| *listed == name).unwrap_or(usize::MAX)
    }

    /// The one step in which the cache begins to use a backend and ends to use the one that it replaces, which is given back.
    fn switch_in(
        &self,
        member: &Arc<Member>,
        mode: &AttachMode,
        change: &PolicyChange,
    ) -> Result<Option<Arc<Member>>, String> {
        let refuse = |why: String| format!("storage backend {}: {why}", member.name);
        let Some(instance) = member.instance() else { return Err(refuse("it is not open".into())) };
        let mut board = lock(&self.board);
        Board::forget(&mut board.coming, member);
        if let Some(reason) = member.called_off() {
            return Err(refuse(reason));
        }
        if !member.state.serves() {
            let report = member.state.report();
            return Err(refuse(format!("it is {}: {}", report.state.as_str(), report.reason)));
        }
        let rank = self.rank(&member.name);
        let plan = board.plan(&member.name, mode, member.ticket(), rank).map_err(refuse)?;
        let place = board.place(&plan);
        // From here on nothing fails.
        self.sink.set_policies(change);
        self.sink.attached(instance.clone(), place);
        let replaced = board.put(&plan, rank, member.clone(), true);
        if let Some(replaced) = &replaced {
            board.leave(replaced, &format!("replaced by {}", member.name));
        }
        Ok(replaced)
    }

    /// Ends what came up in vain.
    fn turn_away(self: &Arc<Self>, member: &Arc<Member>, error: &str) -> Refused {
        let refused = Refused { error: AdminError::new(error), member: Some(member.clone()) };
        let mut board = lock(&self.board);
        Board::forget(&mut board.coming, member);
        board.leave(member, error);
        drop(board);
        if member.instance().is_some() {
            self.retire(member, true, error);
            // All is as it was before the answer, if the plugin lets it be.
            member.wait_end_within(CLOSE_TIMEOUT);
            return refused;
        }
        member.state.go_if(|before| before != BackendState::Failed, BackendState::Failed, error);
        if !member.calls.is_idle() {
            member.state.go(BackendState::Zombie, &format!("a call of its attach has not returned: {error}"));
        }
        self.ended(member, member.calls.is_idle());
        refused
    }

    /// Shows in its place a backend of the configuration that could not be attached.
    pub fn keep_place(&self, name: &str, member: Option<Arc<Member>>) {
        let Some(member) = member else { return };
        let mut board = lock(&self.board);
        let rank = self.rank(name);
        if let Ok(plan) = board.plan(name, &AttachMode::Add, member.ticket(), rank) {
            board.past.retain(|past| past.instance != member.ticket());
            Board::forget(&mut board.leaving, &member);
            board.put(&plan, rank, member, false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::admin::StorageAdmin;
    use super::super::shutdown_tests::empty;
    use super::*;

    #[test]
    fn each_attach_beyond_the_most_at_a_time_read_a_plugin_first() {
        let manager = empty();
        let attach = || {
            let request = AttachRequest {
                backend: "none".to_owned(),
                config: None,
                prefetch_policy: None,
                write_policy: None,
                mode: AttachMode::Add,
            };
            manager.attach(request).unwrap_err().to_string()
        };
        assert!(attach().contains("no plugin named \"none\""), "the files were read: {}", attach());
        let mut searches: Vec<_> = (0..8).map(|_| Search::take(&manager.shared, "near").unwrap()).collect();
        assert!(attach().contains("8 backends are being opened already: near, near"), "{}", attach());
        // Those that are being opened count as well.
        let coming = |name| Member::new(name, name, Default::default(), StateCell::new(name, Box::new(|_| {})));
        searches.pop();
        assert!(attach().contains("no plugin named"), "{}", attach());
        lock(&manager.shared.board).coming.push(coming("far"));
        assert!(attach().contains("8 backends are being opened already: far, near"), "{}", attach());
        drop(searches);
        assert!(attach().contains("no plugin named"), "{}", attach());
        assert!(lock(&manager.shared.board).sought.is_empty());
    }
}
