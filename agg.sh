perf script -i /tmp/perfw/perf.data -F comm,ip,sym,dso 2>/dev/null | python3 -c "
import sys,re
from collections import Counter
c=Counter(); T=Counter()
for l in sys.stdin:
    p=l.split(None,2)
    if len(p)<3: continue
    comm=p[0].split('_')[0]; rest=p[2]; m=re.match(r'(.*) \((.*)\)\s*$',rest); sym=m[1].split('+')[0] if m else rest; dso=(m[2] if m else '').split('/')[-1][:22]
    c[comm,dso,sym[:70]]+=1; T[comm]+=1
n=sum(T.values())
for k,v in T.most_common(): print(f'== {k} {v/n*100:.1f}%')
    
for k in T:
    print('=====',k)
    d=Counter()
    for (a,b,s),v in c.items():
        if a==k: d[b]+=v
    print('  ', [(b,round(v/n*100,2)) for b,v in d.most_common(8)])
    for (a,b,s),v in c.most_common():
        if a==k and v/n>0.0012: print(f'   {v/n*100:5.2f} {b:24s} {s}')
"
