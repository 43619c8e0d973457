"""Keep an open page up to date, under a policy for the browser.

The script requests the page again and replaces the sections that have changed, so nothing flickers, and selections and
scroll positions elsewhere stay. It reads text from its own address only; markup inside a value could neither run (the
policy allows this script only, by its digest) nor load anything.

Invariants: there is one request at a time, and none while the page is hidden. Without a response, or after a refusal,
the page shows its age, and requests become less frequent, down to one a minute.
"""

from __future__ import annotations

from trainium_contract.pages.html import STYLE, compute_csp_digest

REFRESH_SECONDS = 5
LIVE_SCRIPT = """
(() => {
  const refreshMs = %d000, notice = document.getElementById('quiet');
  let updated = Date.now(), wait = refreshMs, fetching = false;
  const updateSections = (main, fresh) => {
    const ids = (parent) => [...parent.children].map((section) => section.id).join();
    if (ids(main) !== ids(fresh)) { main.replaceChildren(...fresh.children); return; }
    [...fresh.children].forEach((section, index) => {
      const old = main.children[index];
      if (old.outerHTML === section.outerHTML) return;
      const scrolls = [...old.querySelectorAll('.scroll')].map((box) => box.scrollLeft);
      old.replaceWith(section);
      section.querySelectorAll('.scroll').forEach((box, number) => { box.scrollLeft = scrolls[number] || 0; });
    });
  };
  const refresh = async () => {
    if (document.hidden || fetching) return;
    fetching = true;
    try {
      const response = await fetch(location.href, {
        cache: 'no-store', redirect: 'error', signal: AbortSignal.timeout(20000),
      });
      const text = await response.text();
      if (!response.ok) throw new Error(text.length < 500 ? text : 'HTTP ' + response.status);
      const fresh = new DOMParser().parseFromString(text, 'text/html').querySelector('main');
      if (fresh === null) throw new Error('another page came than was asked for');
      updateSections(document.querySelector('main'), fresh);
      updated = Date.now();
      wait = refreshMs;
      notice.hidden = true;
    } catch (error) {
      wait = Math.min(2 * wait, 12 * refreshMs);
      const seconds = Math.round((Date.now() - updated) / 1000);
      notice.textContent = 'What is shown is ' + seconds + ' s old. ' + error.message;
      notice.hidden = false;
    } finally {
      fetching = false;
    }
  };
  const schedule = async () => { await refresh(); setTimeout(schedule, wait); };
  setTimeout(schedule, refreshMs);
  document.addEventListener('visibilitychange', refresh);
})();
""".replace("%d000", f"{REFRESH_SECONDS}000")
HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; style-src {compute_csp_digest(STYLE)}; script-src {compute_csp_digest(LIVE_SCRIPT)}; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every live page."""
