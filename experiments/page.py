"""Style and script of the report."""

STYLE = """
:root{--bg:#f8f9fb;--card:#fff;--ink:#1a202c;--dim:#667085;--line:#e4e7ec;--link:#0b5cad;--head:#f2f4f7;
--yes:#067647;--yes-bg:#dcfae6;--no:#b42318;--no-bg:#fee4e2;--und:#93590a;--und-bg:#fef0c7}
@media (prefers-color-scheme:dark){:root{--bg:#101418;--card:#181d23;--ink:#e6e9ee;--dim:#98a2b3;--line:#2b323b;
--link:#7cb8f5;--head:#1f262e;--yes:#75e0a7;--yes-bg:#0b3a26;--no:#fda29b;--no-bg:#4d1712;--und:#fec84b;--und-bg:#473409}}
*{box-sizing:border-box}
html{scroll-behavior:smooth;scroll-padding-top:3.5rem}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
header,main,nav{max-width:1120px;margin:0 auto;padding:0 20px}
header{padding-top:32px}
h1{font-size:1.9rem;letter-spacing:-.02em;margin:0}
h2{font-size:1.3rem;letter-spacing:-.01em;margin:0 0 4px}
h3{font-size:.95rem;font-weight:400;margin:18px 0 10px}
a{color:var(--link);text-decoration:none}a:hover{text-decoration:underline}
.dim{color:var(--dim)}p.dim{margin:2px 0 12px}
.tiles{display:flex;flex-wrap:wrap;gap:10px;margin:14px 0}
.tile{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:10px 16px;color:var(--dim)}
.tile b{display:block;font-size:1.5rem;line-height:1.2;color:var(--ink)}
.tile.yes b{color:var(--yes)}.tile.no b{color:var(--no)}.tile.undecided b{color:var(--und)}
nav{position:sticky;top:0;z-index:1;display:flex;gap:6px;overflow-x:auto;background:var(--bg);padding-top:8px;padding-bottom:8px}
nav a{white-space:nowrap;border:1px solid var(--line);border-radius:99px;padding:2px 12px;background:var(--card);
color:var(--ink)}
section{background:var(--card);border:1px solid var(--line);border-radius:14px;padding:22px 24px;margin:16px 0}
.claim{margin:0;color:var(--dim);max-width:75ch}
.scroll{overflow-x:auto;margin:10px 0 16px}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
caption{text-align:left;font-weight:600;padding:4px 0 6px}
th{text-align:left;font-weight:600;font-size:.78rem;color:var(--dim);background:var(--head);padding:6px 12px;
white-space:nowrap}
td{padding:7px 12px;border-top:1px solid var(--line);vertical-align:top}
th.n,td.n{text-align:right;white-space:nowrap}td.c{white-space:nowrap}
#ledger td:nth-child(2),.run td:first-child{min-width:180px}
tbody tr:hover{background:var(--head)}
.run tbody td:first-child{font-weight:600}
td small{color:var(--dim);font-size:.92em}
.pill{display:inline-block;border-radius:99px;padding:0 10px;font-size:.8rem;font-weight:600;white-space:nowrap;
margin-right:4px}
.pill.yes{color:var(--yes);background:var(--yes-bg)}.pill.no{color:var(--no);background:var(--no-bg)}
.pill.undecided{color:var(--und);background:var(--und-bg)}
td.runs{min-width:130px;line-height:1.2}
.others{margin:22px 0 6px;font-weight:600}
.runs i{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:3px}
i.yes{background:#12a150}i.no{background:#e5484d}i.undecided{background:#f0b429}
.filter{margin:0 0 6px}.filter button{font:inherit;font-size:.82rem;color:var(--ink);background:none;cursor:pointer;
border:1px solid var(--line);border-radius:99px;padding:1px 12px;margin-right:6px}
.filter button.on{background:var(--ink);color:var(--card)}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(340px,100%),1fr));gap:16px;margin:12px 0}
figure{margin:0;max-width:640px}figure img{width:100%;background:#fff;border:1px solid var(--line);border-radius:10px}
figcaption{color:var(--dim);font-size:.82rem;margin-top:4px}
.curve svg{width:100%;fill:none;stroke-width:1.6}.curve line{stroke:var(--line)}
.curve text{fill:var(--dim);stroke:none;font-size:11px}
figcaption span{margin-left:10px;white-space:nowrap}
figcaption i{display:inline-block;width:14px;height:3px;border-radius:2px;margin-right:5px;vertical-align:middle}
.note{color:var(--dim);border-left:3px solid var(--line);padding-left:12px;margin:8px 0}
details{border-top:1px solid var(--line)}summary{cursor:pointer;padding:8px 0;color:var(--dim)}
summary b{color:var(--ink)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 18px;margin:0 0 12px;font-size:.88rem}
dt{color:var(--dim)}dd{margin:0;font-family:ui-monospace,Menlo,Consolas,monospace;overflow-wrap:anywhere}
.problem{border-left:3px solid #f0b429;padding-left:12px}
code{display:block;font:.82rem ui-monospace,Menlo,Consolas,monospace;color:var(--dim);overflow-wrap:anywhere}
@media print{nav,.filter{display:none}section{break-inside:avoid;border:0;padding:0}body{background:#fff}}
""".replace("\n", "")

SCRIPT = """
document.querySelectorAll('.filter button').forEach(b=>b.onclick=()=>{
 document.querySelectorAll('.filter button').forEach(o=>o.classList.toggle('on',o===b));
 document.querySelectorAll('#ledger tbody tr').forEach(r=>r.hidden=b.dataset.v!=='all'&&r.dataset.v!==b.dataset.v)});
document.querySelectorAll('th').forEach(h=>{h.style.cursor='pointer';h.onclick=()=>{
 const body=h.closest('table').tBodies[0],i=h.cellIndex,d=h.dataset.d=h.dataset.d==='1'?'-1':'1',
 key=r=>r.cells[i].textContent.trim(),num=s=>parseFloat(s.replace(/,/g,''));
 [...body.rows].sort((a,b)=>{const x=key(a),y=key(b),p=num(x),q=num(y);
  return d*(isNaN(p)||isNaN(q)?x.localeCompare(y):p-q)}).forEach(r=>body.append(r))}});
"""
